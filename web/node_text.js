/**
 * Text on our nodes: what a node said when it ran, and what its run gained. The page keeps it beside the graph, for as
 * long as it is open: a run changes neither what is saved nor what can be undone.
 */

import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";
import { graphsButtons, isAnswered, isOffered, onAnswer } from "./cuda_graphs.js";
import { h, setAttribute, setText } from "./dom.js";
import { feed } from "./feed.js";
import { seconds } from "./format.js";
import { fetchState } from "./server.js";
import { lineText, loadTexts, onLanguage, stageText, t } from "./texts.js";

const NAME = "accel_text";
const AROUND = 16; // pixels: padding, and what the page leaves around a widget
const MOST_ASKED = 256;
const MOST_EARLY = 8; // prompts
const RESTS = [2, 4]; // modes of a node that is muted or bypassed

const KEPT = "accel.prompts"; // in the session's storage, which outlives a reload
const CHOICES = ["width", "height", "batch_size", "length", "quality"];

const askedFrom = new Map(); // id of a prompt → the workflow that was open when it was queued, and its choices then
const early = new Map(); // id of a prompt → what to do once it is known whose it is
const texts = new WeakMap(); // workflow → {said, passing}, each by a node's place: functions that give a text; choices
let ticking = null;

/** Hear what our nodes have to say; once, when the page is set up. */
export function startNodeTexts() {
  document.head.append(h("link", { rel: "stylesheet", href: new URL("node_text.css", import.meta.url).href }));
  loadTexts().then(redraw);
  onLanguage(() => setTimeout(redraw));
  app.extensionManager?.workflow?.$subscribe?.(settle); // another workflow is open
  api.addEventListener("graphChanged", redraw); // and may have other choices than its lines are of
  api.addEventListener("graphCleared", () => texts.delete(openWorkflow())); // it numbers its nodes anew
  rememberPrompts();
  onAnswer(redraw);
  feed.onMessage((message) => {
    const { event, prompt_id: prompt, node, lines, offers } = message;
    if (event === "node_lines") noteLines(prompt, lines, offers);
    else if (event === "node_compiling" && node)
      note(prompt, ({ passing }) => passing.set(node, passingText(message)));
    else if (event === "node_compiled") endPassing(prompt, ({ isLast }) => isLast);
    else if (event === "node_code_ready") endPassing(prompt);
    else if (event === "reconnecting") openWorkflows().forEach((one) => texts.get(one)?.passing.clear());
  });
  // A step is done, and with it what was compiled in it, however many kinds there were to be.
  api.addEventListener("progress", ({ detail: { prompt_id: prompt, value } }) => {
    if (value > 0 && texts.get(origin(prompt)?.workflow)?.passing.size) endPassing(prompt, ({ isBeside }) => !isBeside);
  });
  api.addEventListener("executed", ({ detail: { prompt_id, display_node, node, output } }) => {
    const [text] = output?.text ?? [];
    if (typeof text === "string") note(prompt_id, ({ said }) => said.set(String(display_node ?? node), () => text));
  });
  for (const end of ["execution_success", "execution_error", "execution_interrupted"])
    api.addEventListener(end, ({ detail }) => endPassing(detail.prompt_id));
  if (Object.keys(kept()).length) catchUp();
}

const openWorkflow = () => app.extensionManager?.workflow?.activeWorkflow ?? app;
const openWorkflows = () => app.extensionManager?.workflow?.openWorkflows ?? [app];

/** What was said while the page was loaded again. */
async function catchUp() {
  const { last_run: run, cuda_graphs: graphs } = (await fetchState(0)).data ?? {};
  if (!kept()[run?.prompt]) return;
  const times = isOffered(graphs) && run.graphs_would_give?.toFixed(1);
  noteLines(run.prompt, run.lines, times && { [run.compiling.node]: { times } });
}

/** Prompts of this tab: id → path of the workflow, and its choices. */
function kept() {
  try {
    return JSON.parse(sessionStorage.getItem(KEPT)) ?? {};
  } catch {
    return {};
  }
}

function keep(id, path, choices) {
  const all = Object.entries({ ...kept(), [id]: [path, choices] }).slice(-MOST_EARLY);
  try {
    sessionStorage.setItem(KEPT, JSON.stringify(Object.fromEntries(all)));
  } catch {} // it is full, or not allowed
}

/** Where a prompt was queued, and what was chosen then; undefined where nobody knows. */
function origin(id) {
  if (askedFrom.has(id)) return askedFrom.get(id);
  const [path, choices] = kept()[id] ?? [];
  const workflow = path && openWorkflows().find((one) => one.path === path);
  return workflow && { workflow, choices };
}

/** Do what waited for its workflow, which the page opens some time after it was loaded. */
function settle() {
  for (const [id, acts] of [...early]) {
    if (!origin(id)) continue;
    early.delete(id);
    for (const act of acts) note(id, act);
  }
  redraw();
}

/** What a line is of, as the graph has it now: the sizes in it, and our nodes' quality, by place and name; as JSON. */
function choicesNow() {
  const found = {};
  for (const [place, { widgets }] of everyNode(rootGraph()))
    for (const { name, value } of widgets ?? []) if (CHOICES.includes(name)) found[`${place} ${name}`] = value;
  return JSON.stringify(found);
}

/** Whether something is chosen otherwise by now; nodes that came or went since are no matter. */
function areOther(choices) {
  const now = JSON.parse(choicesNow());
  return Object.entries(JSON.parse(choices)).some(([place, value]) => place in now && now[place] !== value);
}

const rootGraph = () => app.graph?.rootGraph ?? app.graph;

/** What a node says of a compilation: how far it is, with a clock; or how much is ready of what is made beside. */
function passingText(message) {
  const { number, of, seconds: passed = 0, left, stage } = message;
  const [isBeside, said] = [stage === "beside", performance.now()];
  const since = () => (performance.now() - said) / 1000;
  const clock = () => seconds(Math.floor(passed + since()));
  const rest = () => left > since() && t("timeLeft", { time: seconds(Math.ceil(left - since())) });
  const beside = () => [t("besideOnNode", { ready: number - 1, of }), rest()];
  const parts = isBeside ? beside : () => [t("compilingOnNode", message), stageText(message), clock()];
  return Object.assign(() => parts().filter(Boolean).join(" · "), { isBeside, isLast: number >= of });
}

function endPassing(prompt, isOver = () => true) {
  note(prompt, ({ passing }) => passing.forEach((text, place) => isOver(text) && passing.delete(place)));
}

function noteLines(prompt, lines, offers) {
  const textOf = (place, line) => Object.assign(() => lineText(line), { offer: offers?.[place] });
  const all = Object.entries(lines).map(([place, line]) => [place, textOf(place, line)]);
  note(prompt, ({ said }) => all.forEach(([place, text]) => said.set(place, text)));
}

/** Only the page knows which workflow a prompt is of: copies of a template share their id. */
function rememberPrompts() {
  const queue = api.queuePrompt;
  api.queuePrompt = async function (...args) {
    const [workflow, choices] = [openWorkflow(), choicesNow()];
    const answer = await queue.apply(this, args);
    const id = answer?.prompt_id;
    if (id) {
      askedFrom.set(id, { workflow, choices });
      keep(id, workflow.path, choices);
      if (askedFrom.size > MOST_ASKED) askedFrom.delete(askedFrom.keys().next().value);
      settle();
    }
    return answer;
  };
}

/** Let `act` change the texts of the workflow that the prompt is of. */
function note(prompt, act) {
  const { workflow, choices } = origin(prompt) ?? {};
  if (!workflow) {
    early.set(prompt, [...(early.get(prompt) ?? []), act]);
    if (early.size > MOST_EARLY) early.delete(early.keys().next().value);
    return;
  }
  if (texts.get(workflow)?.choices !== choices) texts.set(workflow, { said: new Map(), passing: new Map(), choices });
  act(texts.get(workflow));
  if (workflow === openWorkflow()) redraw();
}

/** Draw what the nodes of the open workflow have said. */
function redraw() {
  const { said, passing, choices } = texts.get(openWorkflow()) ?? { said: new Map(), passing: new Map() };
  clearTimeout(ticking);
  if (passing.size) ticking = setTimeout(redraw, 1000);
  const isOutdated = choices !== undefined && areOther(choices);
  const found = new Map();
  for (const [place, node] of everyNode(rootGraph())) {
    if (!node.subgraph && !node.comfyClass?.startsWith("Accel")) continue;
    const now = textsAt(node, place, passing);
    // Subgraphs of one kind share their nodes.
    found.set(node, [...(found.get(node) ?? []), ...(now.length ? now : isOutdated ? [] : textsAt(node, place, said))]);
  }
  for (const [node, all] of found) {
    const offer = isAnswered ? undefined : all.find((text) => text.offer)?.offer;
    const lines = new Set(all.map((text) => text()));
    if (offer) lines.add(t("graphsOfferOnNode", offer));
    drawText(node, [...lines].filter(Boolean).join("\n"), Boolean(offer), passing.size > 0);
  }
}

/** The texts of a place; for the node of a subgraph, those within it. */
function textsAt(node, place, by) {
  const own = by.has(place) ? [by.get(place)] : [];
  const inside = node.subgraph ? [...by.keys()].filter((other) => other.startsWith(`${place}:`)) : [];
  return [...own, ...inside.map((other) => by.get(other))];
}

/** Every node, with its place as the server names it: "7", or "5:7" inside of a subgraph. */
function* everyNode(graph, before = "") {
  for (const node of graph?.nodes ?? []) {
    const place = `${before}${node.id}`;
    yield [place, node];
    if (node.subgraph) yield* everyNode(node.subgraph, `${place}:`);
  }
}

function drawText(node, text, isOffer, isPassing) {
  let widget = node.widgets?.find(({ name }) => name === NAME);
  const [said, buttons] = widget?.element.children ?? [];
  if ((said?.textContent ?? "") === text && Boolean(buttons?.children.length) === isOffer) return;
  widget ??= addWidget(node);
  setAttribute(widget.element.firstChild, "aria-live", isPassing ? "off" : null); // nobody wants to hear a clock
  setText(widget.element.firstChild, text);
  widget.element.title = text;
  widget.element.lastChild.replaceChildren(...(isOffer ? graphsButtons("ask") : []));
}

function addWidget(node) {
  const [, height] = node.size;
  const said = h("div", { role: "status" });
  const buttons = h("div", { class: "accel-node-buttons" });
  const element = h("div", { class: "accel-node-text" }, said, buttons);
  const widget = node.addDOMWidget(NAME, "accel_text", element, {
    serialize: false,
    hideOnZoom: false,
    getValue: () => said.textContent,
    setValue: () => {},
    onDraw: () => element.classList.toggle("accel-dim", RESTS.includes(node.mode)), // Vue dims the whole node
  });
  widget.serialize = false;
  const measured = () => (said.textContent ? AROUND + said.offsetHeight + buttons.offsetHeight : 0);
  widget.computeLayoutSize = () => ({ minHeight: measured(), minWidth: 0 });
  const observer = new ResizeObserver(() => grow(node));
  for (const part of [said, buttons]) observer.observe(part);
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

/** Make room for the text; a node is never made smaller. */
function grow(node) {
  const wanted = node.computeSize();
  if (wanted[1] > node.size[1]) node.setSize([node.size[0], wanted[1]]);
  node.setDirtyCanvas?.(true, true);
}
