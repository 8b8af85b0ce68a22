/**
 * Text on our nodes that stays: what a node said when it ran, or what its run gained. It is kept in the node's
 * properties, so that a saved workflow has it, and drawn by a widget that is neither saved nor sent.
 */

import { app } from "../../scripts/app.js";
import { h, setText } from "./dom.js";
import { feed } from "./feed.js";
import { lineText, loadTexts, onLanguage, stageText, t } from "./texts.js";

const NAME = "accel_text"; // of the widget, and of the property: a text, or reasons, which any language can show
const LINE = 18; // pixels
const PADDING = 12;

const waiting = new Map(); // workflow → node → line, of workflows that are not open

const rootGraph = () => app.graph?.rootGraph ?? app.graph;

/** Hear what our nodes have to say; once, when the page is set up. */
export function startNodeTexts() {
  document.head.append(h("link", { rel: "stylesheet", href: new URL("node_text.css", import.meta.url).href }));
  loadTexts().then(redraw);
  onLanguage(() => setTimeout(redraw));
  feed.onMessage((message) => {
    if (message.lines && message.workflow) {
      waiting.set(message.workflow, { ...waiting.get(message.workflow), ...message.lines });
      showWaitingLines();
    }
    if (message.event === "compiling" && message.workflow === rootGraph()?.id) {
      const node = findNode(message.node);
      const said = [t("compilingOnNode", message), stageText(message)];
      if (isOurs(node)) drawText(node, said.filter(Boolean).join(" · "));
    }
  });
}

/** Show what runs of the workflow that is open said, also while another one was open. */
export function showWaitingLines() {
  const id = rootGraph()?.id;
  const lines = waiting.get(id) ?? {};
  waiting.delete(id);
  for (const [place, line] of Object.entries(lines)) {
    const node = findNode(place);
    if (!isOurs(node)) continue;
    keep(node, line);
  }
}

/** A node of ours: text that it gave when it ran. */
export function onExecuted(node, output) {
  const text = output?.text?.[0];
  if (typeof text === "string") keep(node, text);
}

/** After a node was made from a workflow: what it said last. */
export function onConfigured(node) {
  const said = node.properties?.[NAME];
  const text = Array.isArray(said) ? lineText(said) : said;
  if (typeof text === "string" && text) drawText(node, text);
}

const isOurs = (node) => Boolean(node?.comfyClass?.startsWith("Accel"));

/** id: as the server names a node, "7", or "5:7" inside of a subgraph */
function findNode(id) {
  let graph = rootGraph();
  let node = null;
  for (const part of String(id ?? "").split(":")) {
    node = graph?.getNodeById?.(Number(part)) ?? graph?.getNodeById?.(part) ?? null;
    graph = node?.subgraph;
  }
  return node;
}

function keep(node, said) {
  node.properties[NAME] = said;
  onConfigured(node);
}

function drawText(node, text) {
  const widget = node.widgets?.find(({ name }) => name === NAME) ?? addWidget(node);
  setText(widget.element, text);
  widget.element.title = text;
  grow(node);
}

function addWidget(node) {
  const element = h("div", { class: "accel-node-text", role: "status" });
  const options = { serialize: false, hideOnZoom: false, getValue: () => element.textContent, setValue: () => {} };
  const widget = node.addDOMWidget(NAME, "accel_text", element, options);
  widget.serialize = false;
  widget.computeLayoutSize = () => ({ minHeight: heightOf(node, element), minWidth: 0 });
  return widget;
}

/** Of the text, wrapped in the node's width; counted in characters, since a node off the screen has no layout. */
function heightOf(node, element) {
  const perLine = Math.max(10, Math.floor((node.size[0] - 2 * PADDING) / 6.5));
  const wide = (line) => line.length + (line.match(/[\u2e80-\uffef]/g)?.length ?? 0) * 0.7;
  const lines = element.textContent.split("\n").map((line) => Math.max(1, Math.ceil(wide(line) / perLine)));
  return lines.reduce((sum, count) => sum + count, 0) * LINE + PADDING;
}

/** Make room for the text; a node is never made smaller. */
function grow(node) {
  const wanted = node.computeSize();
  if (wanted[1] > node.size[1]) node.setSize([node.size[0], wanted[1]]);
  node.setDirtyCanvas?.(true, true);
}

function redraw() {
  for (const node of allNodes(rootGraph())) if (isOurs(node)) onConfigured(node);
}

function* allNodes(graph) {
  for (const node of graph?.nodes ?? []) {
    yield node;
    if (node.subgraph) yield* allNodes(node.subgraph);
  }
}
