// Small ways to write to the page without disturbing it: what has not changed is not touched.

/** The element with this id. */
export const byId = (id) => document.getElementById(id);

/** Makes an element with a class, and a text or children. */
export function make(name, className, ...children) {
  const element = document.createElement(name);
  if (className) element.className = className;
  element.append(...children);
  return element;
}

/** Sets a text, if it is another one. */
export function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Sets a figure and its unit in the element that has both. */
export function writeFigure(id, [value, unit]) {
  const element = byId(id);
  write(element.querySelector(".number"), value);
  write(element.querySelector(".unit"), unit);
}

const shown = new WeakMap();

/** Fills a table's body; cells are texts or elements. The first cell is the row's header. */
export function fillRows(body, rows, empty) {
  const key = JSON.stringify(rows, (_, value) => (value instanceof Node ? value.outerHTML : value));
  if (shown.get(body) === key) return;
  shown.set(body, key);
  if (rows.length === 0) {
    const cell = make("td", "empty", empty);
    cell.colSpan = body.parentElement.tHead.rows[0].cells.length;
    body.replaceChildren(make("tr", "", cell));
    return;
  }
  body.replaceChildren(
    ...rows.map((cells) => {
      const row = make("tr", "");
      cells.forEach((content, i) => {
        const cell = make(i === 0 ? "th" : "td", "", content ?? "–");
        if (i === 0) cell.scope = "row";
        row.append(cell);
      });
      return row;
    }),
  );
}

/** A bar beside its figure: a meter, whose fill is `part` of it. */
export function fillBar(bar, part) {
  const clamped = Math.min(1, Math.max(0, part || 0));
  bar.firstElementChild.style.inlineSize = `${(clamped * 100).toFixed(1)}%`;
}

let address = "";

/** Has the browser save bytes as a file. */
export function save(blob, name) {
  URL.revokeObjectURL(address);
  address = URL.createObjectURL(blob);
  const link = make("a", "");
  link.href = address;
  link.download = name;
  link.click();
}

/** Marks boxes that have more beside what is in view, so that a phone shows that they scroll. */
export function watchScrolling() {
  const mark = (box) => {
    const rest = box.scrollWidth - box.clientWidth - box.scrollLeft;
    box.dataset.more = `${box.scrollLeft > 1 ? "before " : ""}${rest > 1 ? "behind" : ""}`.trim();
  };
  const sizes = new ResizeObserver((entries) => entries.forEach(({ target }) => mark(target.closest(".scroll"))));
  for (const box of document.querySelectorAll(".scroll")) {
    box.addEventListener("scroll", () => mark(box), { passive: true });
    sizes.observe(box);
    for (const child of box.children) sizes.observe(child);
  }
}

/** Writes the head of a table whose first column has a name and whose others are ops. */
export function fillHead(table, first, ops) {
  const wanted = [first, ...ops].join("|");
  if (table.dataset.head === wanted) return;
  table.dataset.head = wanted;
  const cells = [first, ...ops].map((text, i) => {
    const cell = make("th", i ? "n" : "", text);
    cell.scope = "col";
    return cell;
  });
  table.tHead.replaceChildren(make("tr", "", ...cells));
}
