// Markdown of an answer as nodes. marked reads it; only text nodes and the elements below are made of what it finds, so
// that no answer is ever read as markup: HTML stays text, pictures become links, and links lead to http and https alone.
const ENTITIES = {"&amp;": "&", "&lt;": "<", "&gt;": ">", "&quot;": "\"", "&#39;": "'", "&nbsp;": "\u00a0"};
const plain = (text) => text.replace(/&(?:amp|lt|gt|quot|#39|nbsp);/g, (entity) => ENTITIES[entity]);
const INLINE = {strong: "strong", em: "em", del: "del"};

const markdown = (text) => blocks(marked.lexer(text, {gfm: true, breaks: true}));

const blocks = (tokens) => tokens.flatMap((token) => {
  switch (token.type) {
    case "space": case "def": return [];
    case "heading": return [make(`h${Math.min(6, token.depth + 2)}`, "", ...inline(token.tokens))];
    case "paragraph": return [make("p", "", ...inline(token.tokens))];
    case "code": return [codeBlock(token.text, token.lang)];
    case "blockquote": return [make("blockquote", "", ...blocks(token.tokens))];
    case "hr": return [make("hr")];
    case "list": return [listOf(token)];
    case "table": return [tableOf(token)];
    case "text": return token.tokens ? inline(token.tokens) : [plain(token.text)];
    case "checkbox": return [token.checked ? "☑ " : "☐ "];
    default: return [make("p", "", token.raw)];  // HTML too
  }
});

const inline = (tokens) => tokens.flatMap((token) => {
  if (token.type in INLINE) return [make(INLINE[token.type], "", ...inline(token.tokens))];
  switch (token.type) {
    case "text": return token.tokens ? inline(token.tokens) : [plain(token.text)];
    case "escape": return [token.text];
    case "codespan": return [make("code", "", token.text)];
    case "br": return [make("br")];
    case "link": return [linkTo(token.href, inline(token.tokens), token.raw)];
    case "image": return [linkTo(token.href, [`picture: ${token.text || token.href}`], token.raw)];
    case "checkbox": return [token.checked ? "☑ " : "☐ "];
    default: return [token.raw];  // HTML too
  }
});

function linkTo(address, content, raw) {
  if (!/^https?:\/\//i.test(address)) return raw;
  const link = make("a", "", ...content);
  link.href = address;
  link.target = "_blank";
  link.rel = "noopener noreferrer";
  link.title = address;
  return link;
}

function listOf(token) {
  const list = make(token.ordered ? "ol" : "ul", "", ...token.items.map((item) => make("li", "", ...blocks(item.tokens))));
  if (token.ordered && token.start > 1) list.start = token.start;
  return list;
}

function tableOf(token) {
  const line = (cells, tag) => make("tr", "", ...cells.map((cell) => make(tag, "", ...inline(cell.tokens))));
  const scroll = make("div", "scroll", make("table", "", make("thead", "", line(token.header, "th")), make("tbody", "", ...token.rows.map((row) => line(row, "td")))));
  scroll.tabIndex = 0;
  return scroll;
}

function codeBlock(text, language) {
  const pre = make("pre", "", make("code", "", text));
  pre.tabIndex = 0;
  return make("div", "code", make("div", "code-head", make("span", "", language ?? ""), copyButton(() => text)), pre);
}

// Copies, where the browser lets a page do so: over HTTPS and on this computer.
function copyButton(textOf) {
  const button = make("button", "quiet", "Copy");
  button.type = "button";
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(textOf());
      setText(button, "Copied");
    } catch {
      setText(button, "This browser does not let the page copy");
    }
    setTimeout(() => setText(button, "Copy"), 2000);
  });
  return button;
}
