// The key stays in this tab's session storage: in no address, no cookie and no file of the page.
const KEY = "farsight-key";

async function ask(address, limitMs = TIMEOUT_MS) {
  const key = sessionStorage.getItem(KEY);
  const headers = key === null ? {} : {Authorization: `Bearer ${key}`};
  const reply = await fetch(address, {cache: "no-store", credentials: "omit", headers, signal: AbortSignal.timeout(limitMs)});
  const refused = reply.status === 401 || reply.status === 403;
  byId("key-form").hidden = !refused;
  byId("key-note").textContent = refused && key !== null ? (await reply.clone().json()).error.message : "";
  return reply;
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, byId("key").value.trim());
  byId("key").value = "";
});
