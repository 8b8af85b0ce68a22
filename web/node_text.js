/**
 * Text on our nodes: what a node said when it ran, and what its run gained. The page keeps it beside the graph, for as
 * long as it is open: a run changes neither what is saved nor what can be undone.
 */

import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";
import { graphsButtons, isAnswered, onAnswer } from "./cuda_graphs.js";
import { h, setText } from "./dom.js";
import { feed } from "./feed.js";
import { lineText, loadTexts, onLanguage, stageText, t } from "./texts.js";

const NAME = "accel_text";
const LINE = 18; // pixels
const PADDING = 12;
const MOST_ASKED = 256;
const MOST_EARLY = 8; // prompts
const BUTTONS = 28; // pixels, a row
const SIDE_BY_SIDE = 250; // pixels: narrower nodes have a row for each button
const RESTS = [2, 4]; // modes of a node that is muted or bypassed

const askedFrom = new Map(); // id of a prompt → the workflow that was open when it was queued
const early = new Map(); // id of a prompt → what to do once it is known whose it is
const texts = new WeakMap(); // workflow → {said, passing}, each by a node's place: functions that give a text

/** Hear what our nodes have to say; once, when the page is set up. */
export function startNodeTexts() {
  document.head.append(h("link", { rel: "stylesheet", href: new URL("node_text.css", import.meta.url).href }));
  loadTexts().then(redraw);
  onLanguage(() => setTimeout(redraw));
  app.extensionManager?.workflow?.$subscribe?.(redraw); // another workflow is open
  api.addEventListener("graphCleared", () => texts.delete(openWorkflow())); // it numbers its nodes anew
  rememberPrompts();
  onAnswer(redraw);
  feed.onMessage((message) => {
    if (message.event === "node_lines") {
      const textOf = (place, line) => Object.assign(() => lineText(line), { offer: message.offers?.[place] });
      const lines = Object.entries(message.lines).map(([place, line]) => [place, textOf(place, line)]);
      note(message.prompt_id, ({ said }) => lines.forEach(([place, text]) => said.set(place, text)));
    } else if (message.event === "node_compiling" && message.node) {
      const text = () => [t("compilingOnNode", message), stageText(message)].filter(Boolean).join(" · ");
      note(message.prompt_id, ({ passing }) => passing.set(message.node, text));
    }
  });
  api.addEventListener("executed", ({ detail: { prompt_id, display_node, node, output } }) => {
    const [text] = output?.text ?? [];
    if (typeof text === "string") note(prompt_id, ({ said }) => said.set(String(display_node ?? node), () => text));
  });
  for (const end of ["execution_success", "execution_error", "execution_interrupted"])
    api.addEventListener(end, ({ detail }) => note(detail.prompt_id, ({ passing }) => passing.clear()));
}

const openWorkflow = () => app.extensionManager?.workflow?.activeWorkflow ?? app;

/** Only the page knows which workflow a prompt is of: copies of a template share their id. */
function rememberPrompts() {
  const queue = api.queuePrompt;
  api.queuePrompt = async function (...args) {
    const workflow = openWorkflow();
    const answer = await queue.apply(this, args);
    const id = answer?.prompt_id;
    if (id) {
      askedFrom.set(id, workflow);
      if (askedFrom.size > MOST_ASKED) askedFrom.delete(askedFrom.keys().next().value);
      for (const act of early.get(id) ?? []) note(id, act);
      early.delete(id);
    }
    return answer;
  };
}

/** Let `act` change the texts of the workflow that the prompt is of. */
function note(prompt, act) {
  const workflow = askedFrom.get(prompt);
  if (!workflow) {
    early.set(prompt, [...(early.get(prompt) ?? []), act]);
    if (early.size > MOST_EARLY) early.delete(early.keys().next().value);
    return;
  }
  if (!texts.has(workflow)) texts.set(workflow, { said: new Map(), passing: new Map() });
  act(texts.get(workflow));
  if (workflow === openWorkflow()) redraw();
}

/** Draw what the nodes of the open workflow have said. */
function redraw() {
  const { said, passing } = texts.get(openWorkflow()) ?? { said: new Map(), passing: new Map() };
  const found = new Map();
  for (const [place, node] of allNodes(app.graph?.rootGraph ?? app.graph)) {
    const now = textsAt(node, place, passing);
    // Subgraphs of one kind share their nodes.
    found.set(node, [...(found.get(node) ?? []), ...(now.length ? now : textsAt(node, place, said))]);
  }
  for (const [node, all] of found) {
    const offer = isAnswered ? undefined : all.find((text) => text.offer)?.offer;
    const lines = new Set(all.map((text) => text()));
    if (offer) lines.add(t("graphsOfferOnNode", offer));
    drawText(node, [...lines].filter(Boolean).join("\n"), Boolean(offer));
  }
}

/** The texts of a place; for the node of a subgraph, those within it. */
function textsAt(node, place, by) {
  const own = by.has(place) ? [by.get(place)] : [];
  const inside = node.subgraph ? [...by.keys()].filter((other) => other.startsWith(`${place}:`)) : [];
  return [...own, ...inside.map((other) => by.get(other))];
}

/** Every node that may have a text, with its place as the server names it: "7", or "5:7" inside of a subgraph. */
function* allNodes(graph, before = "") {
  for (const node of graph?.nodes ?? []) {
    const place = `${before}${node.id}`;
    if (node.subgraph || node.comfyClass?.startsWith("Accel")) yield [place, node];
    if (node.subgraph) yield* allNodes(node.subgraph, `${place}:`);
  }
}

function drawText(node, text, isOffer) {
  let widget = node.widgets?.find(({ name }) => name === NAME);
  const [said, buttons] = widget?.element.children ?? [];
  if ((said?.textContent ?? "") === text && Boolean(buttons?.children.length) === isOffer) return;
  widget ??= addWidget(node);
  setText(widget.element.firstChild, text);
  widget.element.title = text;
  if (Boolean(widget.element.lastChild.children.length) !== isOffer)
    widget.element.lastChild.replaceChildren(...(isOffer ? graphsButtons("ask") : []));
  grow(node);
}

function addWidget(node) {
  const [, height] = node.size;
  const said = h("div", { role: "status" });
  const element = h("div", { class: "accel-node-text" }, said, h("div", { class: "accel-node-buttons" }));
  const widget = node.addDOMWidget(NAME, "accel_text", element, {
    serialize: false,
    hideOnZoom: false,
    getValue: () => said.textContent,
    setValue: () => {},
    onDraw: () => element.classList.toggle("accel-dim", RESTS.includes(node.mode)), // Vue dims the whole node
  });
  widget.serialize = false;
  widget.computeLayoutSize = () => ({ minHeight: heightOf(node, element), minWidth: 0 });
  const serialize = node.serialize;
  /** As if there were no text: without the widget, which a subgraph's node would save, and as high as before. */
  node.serialize = function () {
    const place = this.widgets.findIndex(({ name }) => name === NAME);
    const [taken] = this.widgets.splice(place, 1);
    try {
      const saved = serialize.call(this);
      // Where it had no widget before, pages such as 1.58 name the values of none.
      if (!Object.keys(saved.widgets_values_named ?? {}).length) delete saved.widgets_values_named;
      return { ...saved, size: [saved.size[0], height] };
    } finally {
      this.widgets.splice(place, 0, taken);
    }
  };
  return widget;
}

/** Of the text, wrapped in the node's width; counted in characters, since a node off the screen has no layout. */
function heightOf(node, element) {
  const [{ textContent: text }, { children: buttons }] = element.children;
  if (!text) return 0;
  const perLine = Math.max(10, Math.floor((node.size[0] - 2 * PADDING) / 6.5));
  const wide = (line) => line.length + (line.match(/[\u2e80-\uffef]/g)?.length ?? 0) * 0.7;
  const lines = text.split("\n").map((line) => Math.max(1, Math.ceil(wide(line) / perLine)));
  const rows = node.size[0] < SIDE_BY_SIDE ? buttons.length : Math.min(buttons.length, 1);
  return lines.reduce((sum, count) => sum + count, 0) * LINE + PADDING + rows * BUTTONS;
}

/** Make room for the text; a node is never made smaller. */
function grow(node) {
  const wanted = node.computeSize();
  if (wanted[1] > node.size[1]) node.setSize([node.size[0], wanted[1]]);
  node.setDirtyCanvas?.(true, true);
}
