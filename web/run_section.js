/** The last run: what it gained first, then how long it took, how much ran compiled and what DeepCache skipped. */

import { compareWithPlain } from "./compare.js";
import { button, h, setText, show } from "./dom.js";
import { count, percent, rate, seconds, size } from "./format.js";
import { lineText, reasonText, t } from "./texts.js";

const MOST_CELLS = 400;

/** Classes of the letters of a run's steps. */
const CELLS = { F: "accel-full", S: "accel-skipped" };

export function runSection() {
  const gain = h("p", { class: "accel-gain", title: t("gainTip") });
  const facts = h("dl", { class: "accel-facts" });
  const how = h("p", { class: "accel-muted" });
  const estimate = h("details", { class: "accel-details" }, h("summary", { text: t("savedHow") }), how);
  const timeline = stepTimeline();
  const element = h(
    "section",
    { class: "accel-section", hidden: true },
    h("h3", { text: t("lastRun") }),
    gain,
    facts,
    estimate,
    timeline.element,
    h("div", { class: "accel-buttons" }, button(t("compare"), compareWithPlain, { title: t("compareTip") })),
  );

  function update({ state }) {
    const run = state?.last_run ?? null;
    show(element, run !== null);
    if (element.hidden) return;
    const [line] = Object.values(run.lines ?? {}); // without a gain, why there is none
    const said = lineText(run.account?.gain?.length ? run.account.gain : (line ?? []));
    show(gain, said !== "");
    setText(gain, said);
    facts.replaceChildren(...rows(run).flatMap(([key, value]) => fact(key, value)));
    timeline.update(run);
    const sentence = (run.account?.how ?? []).map(reasonText).join(" ");
    setText(how, sentence);
    show(estimate, sentence !== "");
  }

  return { elements: [element], update };
}

function fact(key, value) {
  const tip = t(`${key}Tip`);
  return [h("dt", { text: t(key), title: tip }), h("dd", { class: `accel-${key}`, text: value, title: tip })];
}

function rows(run) {
  const found = [];
  const { worked, pays_back_after: more } = run.account ?? {};
  if (!run.failed && run.steps > 0 && worked > 0) found.push(["speed", rate(run.steps / worked)]);
  if (!run.failed && more > 0) found.push(["paysBack", count(more)]);
  if (run.model) found.push(["model", run.model]);
  const batch = { size: size(run.pixels), batch: count(run.latent?.[0]) };
  if (run.pixels) found.push(["imageSize", run.latent?.[0] > 1 ? t("sizeAndBatch", batch) : batch.size]);
  else if (run.latent) found.push(["latent", size(run.latent)]);
  const took = seconds(run.seconds);
  const isStopped = run.failed && typeof run.steps_done === "number";
  const how = isStopped ? "stoppedAfter" : run.steps === 1 ? "inOneStep" : "inSteps";
  const inSteps = { seconds: took, steps: count(run.steps), done: count(run.steps_done) };
  if (typeof run.seconds === "number") found.push(["took", run.steps > 0 ? t(how, inSteps) : took]);
  const isTraced = run.compiling?.backend === "eager";
  const calls = (run.compiled_calls ?? 0) + (run.eager_calls ?? 0);
  if (calls && run.steps_done !== 0) found.push([isTraced ? "tracedCalls" : "compiledCalls", percent(run.compiled_calls / calls)]);
  if (run.compile_seconds > 0)
    found.push([isTraced ? "traceSeconds" : "compileSeconds", seconds(run.compile_seconds)]);
  if (run.model_calls > 0)
    found.push(["replays", t("numberOf", { number: count(run.replays), of: count(run.model_calls) })]);
  if (run.loaded > 0) found.push(["fromDisk", count(run.loaded)]);
  return found;
}

/** One cell a step, full ones filled and tall; what it shows is also said in words. */
function stepTimeline() {
  const cells = h("div", { class: "accel-steps", role: "img" });
  const words = h("p", { class: "accel-muted" });
  const element = h("div", { title: t("deepCacheTip"), hidden: true }, h("h4", { text: t("deepCache") }), cells, words);

  function update(run) {
    const steps = typeof run.steps_taken === "string" ? run.steps_taken.replace(/[^FS]/g, "") : "";
    show(element, steps.length > 0);
    if (!steps) return;
    const of = (letter) => [...steps].filter((step) => step === letter).length;
    const full = run.full_steps ?? of("F");
    const skipped = run.skipped_steps ?? of("S");
    const summary = t("stepsSummary", { full: count(full), skipped: count(skipped) });
    setText(words, summary);
    cells.setAttribute("aria-label", `${summary} ${t("fullSteps", { list: fullSteps(steps) })}`);
    const shown = [...steps.slice(0, MOST_CELLS)];
    cells.replaceChildren(...shown.map((step) => h("span", { class: CELLS[step] })));
  }

  return { element, update };
}

/** "1, 4-6, 9": the places of the full steps, counted from 1. */
function fullSteps(steps) {
  const runs = [...steps.matchAll(/F+/g)];
  const place = ({ 0: run, index }) => (run.length > 1 ? `${index + 1}-${index + run.length}` : index + 1);
  return runs.map(place).join(", ");
}
