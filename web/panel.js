/** The sidebar tab: sections that each show a part of the server's state, and a sentence where there is nothing. */

import { cacheSection } from "./cache_section.js";
import { exportReport, openStarter } from "./commands.js";
import { graphsSection } from "./cuda_graphs.js";
import { button, h, icon, iconButton, setText, show } from "./dom.js";
import { fallbackSection } from "./fallback_section.js";
import { feed } from "./feed.js";
import { machineSection } from "./machine_section.js";
import { progressSection } from "./progress_section.js";
import { runSection } from "./run_section.js";
import { storeSection } from "./store_section.js";
import { loadTexts, onLanguage, t } from "./texts.js";

const STYLES = ["accel.css", "accel_parts.css"].map((name) => new URL(name, import.meta.url).href);
const AGEING = 30_000; // milliseconds between updates of "3 min ago"; nothing is fetched for it

let shown = null;

/** Show the panel in an element of the page's. The page may ask again for the one that is shown. */
export function render(container) {
  if (shown?.container === container && container.contains(shown.root)) return;
  destroy();
  const styles = STYLES.map((href) => h("link", { rel: "stylesheet", href }));
  const root = h("div", { class: "accel-panel", role: "region", "aria-label": "Accel", tabindex: -1 });
  container.classList.add("accel-host");
  const nodes = [...styles, root];
  container.replaceChildren(...nodes);
  const own = { container, root, nodes, parts: [], stops: [] };
  shown = own;
  const rebuild = () => own === shown && build(own);
  own.stops.push(onLanguage(rebuild), leaveToOthers(own));
  loadTexts().then(rebuild);
}

export function destroy() {
  if (!shown) return;
  const { container, nodes, parts, stops } = shown;
  shown = null;
  for (const stop of stops) stop();
  for (const part of parts) part.destroy?.();
  for (const node of nodes) node.remove();
  container.classList.remove("accel-host");
}

/** The page gives the same element to the next pack's tab, and does not say so. */
function leaveToOthers(own) {
  const observer = new MutationObserver(() => {
    if (own === shown && [...own.container.children].some((child) => !own.nodes.includes(child))) destroy();
  });
  observer.observe(own.container, { childList: true });
  return () => observer.disconnect();
}

/** Make everything anew in the page's language. */
function build(own) {
  const isFirst = !own.parts.length;
  for (const part of own.parts) part.destroy?.();
  const before = [progressSection, graphsSection, runSection, fallbackSection];
  const sections = [...before, cacheSection, storeSection, machineSection];
  own.parts = [noticePart(), ...sections.map((make) => make())];
  own.root.replaceChildren(header(), ...own.parts.flatMap((part) => part.elements));
  update(own);
  if (!isFirst) return;
  own.stops.push(feed.watch(() => update(own)));
  const ageing = setInterval(() => document.hidden || update(own), AGEING);
  own.stops.push(() => clearInterval(ageing));
}

function update(own) {
  if (!own.root.isConnected) return destroy(); // taken away without a word, for a tab of the page's own
  for (const part of own.parts) part.update(feed);
}

function header() {
  const refresh = iconButton("refresh", t("refresh"), () => feed.refresh());
  const report = iconButton("download", t("exportReport"), exportReport);
  report.title = t("exportReportTip");
  const buttons = h("div", { class: "accel-buttons" }, refresh, report);
  return h("header", { class: "accel-header" }, h("h2", { text: t("title") }), buttons);
}

/** One friendly sentence where there is nothing to show yet, and what to do about it. */
function noticePart() {
  const sentence = h("p");
  const again = button(t("tryAgain"), () => feed.refresh());
  const starter = button(t("openStarter"), openStarter);
  const parts = [icon("bolt"), sentence, again, starter];
  const element = h("section", { class: "accel-section accel-notice", hidden: true }, ...parts);

  function update({ state, problem, compiling }) {
    const cache = state?.graph_cache;
    const isEmpty = Boolean(state) && !cache?.entries && !cache?.compilations && !cache?.loaded;
    const hasMore = state?.last_run || cache?.fallbacks?.length || compiling;
    const key = problem ?? (state ? (isEmpty && !hasMore ? "empty" : null) : "waiting");
    show(element, key !== null);
    show(again, problem !== null);
    show(starter, key === "empty");
    setText(sentence, key && t(key));
  }

  return { elements: [element], update };
}
