/** Elements made from data. Text is only ever set as text: names and reasons come from models and errors. */

/**
 * An element with properties and children.
 * properties: `class`, `text`, `title`, `on` ({event: listener}), `dataset`; the rest are attributes, of which null,
 * undefined and false are left out.
 */
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  const { class: className, text, on, dataset, ...attributes } = properties;
  if (className) element.className = className;
  if (text !== undefined && text !== null) element.textContent = String(text);
  for (const [event, listener] of Object.entries(on ?? {})) element.addEventListener(event, listener);
  Object.assign(element.dataset, dataset ?? {});
  for (const [name, value] of Object.entries(attributes)) setAttribute(element, name, value);
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export function setAttribute(element, name, value) {
  const wanted = value === true ? "" : String(value);
  if (value === null || value === undefined || value === false) element.removeAttribute(name);
  else if (element.getAttribute(name) !== wanted) element.setAttribute(name, wanted);
}

/** Set the text only where it differs, so that what is selected or read aloud is not disturbed. */
export function setText(element, text) {
  const wanted = String(text ?? "");
  if (element.textContent !== wanted) element.textContent = wanted;
}

export function show(element, isShown) {
  element.hidden = !isShown;
}

const unfolded = new Set(); // kept while the page lives, so that opening the panel again shows it as it was

/** A section that is folded away under its heading until somebody opens it. name: the same in every language. */
export function fold(name, heading, tip, ...children) {
  const summary = h("summary", { title: tip }, h("h3", { text: heading }));
  const element = h("details", { class: "accel-section accel-fold", hidden: true }, summary, ...children);
  element.open = unfolded.has(name);
  element.addEventListener("toggle", () => (element.open ? unfolded.add(name) : unfolded.delete(name)));
  return element;
}

/** One of the page's icons (PrimeIcons), nothing to a screen reader. */
export function icon(name) {
  return h("i", { class: `pi pi-${name}`, "aria-hidden": "true" });
}

/** A button with an icon alone; its name is for screen readers and the tooltip. */
export function iconButton(name, label, onClick) {
  const properties = { class: "accel-icon-button", type: "button", title: label, "aria-label": label };
  return h("button", { ...properties, on: { click: onClick } }, icon(name));
}

/** A button with text. */
export function button(label, onClick, properties = {}) {
  return h("button", { class: "accel-button", type: "button", ...properties, text: label, on: { click: onClick } });
}

/**
 * Make `parent`'s children those for `items`, in their order, reusing what is there.
 * make(item) gives a new element; update(element, item) is called for each. An element that keeps its place is not
 * moved, so that it keeps the focus.
 */
export function reconcile(parent, items, keyOf, make, update) {
  const known = new Map([...parent.children].map((element) => [element.accelKey, element]));
  let place = parent.firstElementChild;
  for (const item of items) {
    const key = keyOf(item);
    let element = known.get(key);
    known.delete(key);
    if (!element) {
      element = make(item);
      element.accelKey = key;
    }
    if (element === place) place = place.nextElementSibling;
    else parent.insertBefore(element, place);
    update(element, item);
  }
  for (const element of known.values()) element.remove();
}
