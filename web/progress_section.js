/** What is being compiled now: a bar that a screen reader is told of at its start and end, not at each block. */

import { h, setAttribute, setText, show } from "./dom.js";
import { seconds } from "./format.js";
import { stageText, t } from "./texts.js";

const TICK = 500; // milliseconds
const STAGES = ["trace", "generate", "build"];
const USUAL = 15; // seconds that a block type takes, until one has been timed

export function progressSection() {
  const name = h("span", { class: "accel-strong" });
  const stage = h("span", { class: "accel-muted" });
  const numbers = h("span", { class: "accel-muted accel-numbers" });
  const bar = h("div", { class: "accel-bar-part" });
  const progress = h("div", { class: "accel-bar", role: "progressbar", "aria-label": t("compiling") }, bar);
  const spinner = h("span", { class: "accel-busy", "aria-hidden": "true" });
  const element = h(
    "section",
    { class: "accel-section accel-progress", hidden: true, title: t("compilingTip") },
    h("div", { class: "accel-line" }, spinner, h("h3", { text: t("compiling") }), numbers),
    progress,
    h("p", {}, name, stage),
    h("p", { class: "accel-muted", text: t("compilingHint") }),
  );
  const spoken = h("div", { class: "accel-spoken", role: "status", "aria-live": "polite" });

  let compiling = null;
  let usual = USUAL;
  let timer = null;

  function draw() {
    const passed = (compiling.seconds ?? 0) + (performance.now() - compiling.at) / 1000;
    // Within a stage nobody knows how far the compiler is: the bar nears its end as time passes.
    const within = Math.max(1 - Math.exp(-passed / usual), STAGES.indexOf(compiling.stage) / STAGES.length);
    const isCounted = compiling.of > 0;
    const part = isCounted ? { number: compiling.number, of: compiling.of } : null;
    setText(name, compiling.name);
    setText(stage, stageText(compiling) && ` · ${stageText(compiling)}`);
    setText(numbers, [part && t("numberOf", part), seconds(Math.floor(passed))].filter(Boolean).join(" · "));
    bar.style.width = isCounted ? `${(100 * Math.max(0, compiling.number - 1 + within)) / compiling.of}%` : "100%";
    bar.classList.toggle("accel-unknown", !isCounted);
    setAttribute(progress, "aria-valuemin", isCounted ? 0 : null);
    setAttribute(progress, "aria-valuemax", isCounted ? compiling.of : null);
    setAttribute(progress, "aria-valuenow", isCounted ? compiling.number - 1 : null);
    setAttribute(progress, "aria-valuetext", part && t("numberOf", part));
  }

  function update({ compiling: now, state }) {
    usual = typicalSeconds(state?.graph_cache?.table) ?? usual;
    if (Boolean(now) !== Boolean(compiling)) setText(spoken, now ? t("compilingStarted") : t("compilingEnded"));
    compiling = now;
    show(element, Boolean(now));
    if (now) {
      draw();
      timer ??= setInterval(draw, TICK);
    } else {
      stop();
    }
  }

  function stop() {
    clearInterval(timer);
    timer = null;
  }

  return { elements: [spoken, element], update, destroy: stop };
}

/** The median of what was compiled in this session. */
function typicalSeconds(table) {
  const times = (table ?? []).filter((row) => row.source === "compiled" && row.seconds > 0).map((row) => row.seconds);
  return times.sort((one, other) => one - other)[Math.floor(times.length / 2)];
}
