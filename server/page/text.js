// Text of people and models on the page.  It is only ever set as text, never read as markup.

/** Fenced code apart from the rest: [{ isCode, text }]. */
export function blocks(text) {
  const found = [{ isCode: false, lines: [] }];
  for (const line of text.split("\n")) {
    const last = found.at(-1);
    if (/^\s*```/.test(line)) found.push({ isCode: !last.isCode, lines: [] });
    else last.lines.push(line);
  }
  if (found.length === 1) return [{ isCode: false, text }];
  const parts = found.map(({ isCode, lines }) => ({ isCode, text: lines.join("\n") }));
  // Code has a margin of its own: blank lines beside it would double it.
  const trimmed = parts.map((part) => (part.isCode ? part : { ...part, text: part.text.replace(/^\n+|\n+$/g, "") }));
  return trimmed.filter((part) => part.text);
}

export function show(element, text) {
  const nodes = blocks(text).map((block) => {
    const node = document.createElement(block.isCode ? "pre" : "span");
    if (block.isCode) node.tabIndex = 0; // it scrolls sideways
    node.textContent = block.text;
    return node;
  });
  element.replaceChildren(...nodes);
}

/** -> whether it worked.  Without https only the older way is open to a page. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = document.createElement("textarea");
    area.value = text;
    area.className = "hidden";
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}
