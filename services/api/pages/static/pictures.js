// Pictures that go with a chat: chosen, dropped or pasted, and sent as data URLs.
const PICTURE_TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const MAX_PICTURES = 8;
const MAX_PICTURE_BYTES = 2.8e6;  // of all together: a body has 4 MiB, and base64 makes four bytes of three
let pictures = [];  // {name, url, bytes}

const megabytes = (bytes) => `${(bytes / 1e6).toFixed(bytes < 1e5 ? 2 : 1)} MB`;

function notePictures(text, isBad = false) {
  byId("picture-note").classList.toggle("bad", isBad);
  setText(byId("picture-note"), text);
}

function drawPictures() {
  byId("thumbs").replaceChildren(...pictures.map((picture, index) => {
    const image = make("img");
    image.src = picture.url;
    image.alt = picture.name;
    image.title = picture.name;
    image.addEventListener("error", () => notePictures(`${picture.name} is no picture that this browser can show; the server may refuse it.`, true));
    const remove = make("button", "", "Remove");
    remove.type = "button";
    remove.setAttribute("aria-label", `Remove ${picture.name}`);
    remove.addEventListener("click", () => removePicture(index));
    return make("li", "", image, remove);
  }));
}

function removePicture(index) {
  const [removed] = pictures.splice(index, 1);
  drawPictures();
  notePictures(`Removed ${removed.name}`);
  const left = byId("thumbs").querySelectorAll("button");
  (left[Math.min(index, left.length - 1)] ?? byId("add-picture")).focus();
}

function problemOf(file) {
  if (model === null || !sees()) return `${file.name || "The picture"} was left out: ${model?.id ?? "the model"} reads text alone.`;
  if (!PICTURE_TYPES.includes(file.type)) return `${file.name} is not a PNG, JPEG, WebP or GIF picture.`;
  if (pictures.length >= MAX_PICTURES) return `A request takes ${MAX_PICTURES} pictures; ${file.name} was left out.`;
  const bytes = pictures.reduce((sum, picture) => sum + picture.bytes, file.size);
  if (bytes > MAX_PICTURE_BYTES) return `${file.name} was left out: it has ${megabytes(file.size)}, and all pictures of a request may have ${megabytes(MAX_PICTURE_BYTES)}.`;
  return "";
}

function readUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => reject(reader.error));
    reader.readAsDataURL(file);
  });
}

async function addFiles(files) {
  const wrong = [];
  for (const file of files) {
    let problem = problemOf(file);
    try {
      const url = problem ? "" : await readUrl(file);
      problem ||= problemOf(file);  // other pictures may have come meanwhile
      if (!problem) pictures.push({name: file.name || "pasted picture", url, bytes: file.size});
    } catch {
      problem = `${file.name} cannot be read.`;
    }
    if (problem) wrong.push(problem);
  }
  drawPictures();
  notePictures(wrong.join(" ") || `${pictures.length} of ${MAX_PICTURES} pictures`, wrong.length > 0);
}

const holdsFiles = (transfer) => transfer !== null && [...transfer.types].includes("Files");

byId("add-picture").addEventListener("click", () => byId("picture-file").click());
byId("picture-file").addEventListener("change", async () => {
  await addFiles([...byId("picture-file").files]);
  byId("picture-file").value = "";  // so that the same file can be chosen again
});
// Anywhere on the page: a browser leaves the page for a file that is dropped beside the form.
addEventListener("dragover", (event) => {
  if (!holdsFiles(event.dataTransfer)) return;
  event.preventDefault();
  byId("ask").classList.add("drop");
});
addEventListener("dragleave", (event) => { if (event.relatedTarget === null) byId("ask").classList.remove("drop"); });
addEventListener("drop", (event) => {
  if (!holdsFiles(event.dataTransfer)) return;
  event.preventDefault();
  byId("ask").classList.remove("drop");
  addFiles([...event.dataTransfer.files]);
});
addEventListener("paste", (event) => {
  const files = [...event.clipboardData?.files ?? []];
  if (!files.length) return;
  event.preventDefault();
  addFiles(files);
});
