/** Workflows that an earlier build saved: what their nodes held, as today's inputs. */

/** Widgets that a node had, in the order in which a workflow has their values; the first ones in still older ones. */
const WIDGETS = {
  AccelDeepCache: ["interval", "depth", "start_percent", "end_percent", "schedule", "threshold", "between", "quality"],
  AccelResolutionSnap: [
    ...["width", "height", "multiple", "mode", "keep_aspect", "max_megapixels"],
    ...["batch_size", "how", "anchor", "fill", "trained_for"],
  ],
  AccelSnapSize: ["width", "height", "batch_size", "multiple", "mode", "keep_aspect", "max_megapixels", "trained_for"],
  AccelSnapImage: ["how", "anchor", "fill", "multiple", "mode", "keep_aspect", "max_megapixels", "trained_for"],
  AccelVAESkipCompile: ["policy", "after", "free_memory_on_new_size"],
};
const QUALITIES = { "40 dB (hard to see)": "Balanced", "32 dB (small changes)": "Fast", "50 dB (same picture)": "50 dB" };

/** Change what a saved node holds, before the page makes the node of it. type: the node's; widgets: today's */
export function bringUpToDate(saved, type, widgets) {
  const names = WIDGETS[type];
  const today = (widgets ?? []).map(({ name }) => name).filter((name) => names?.includes(name));
  const values = saved.widgets_values;
  const isSaved = ({ serialize }) => serialize !== false; // the node's line is not
  if (!names || !Array.isArray(values) || values.length <= (widgets ?? []).filter(isSaved).length) return;
  const held = Object.fromEntries(names.map((name, at) => [name, values[at]]));
  if (type === "AccelDeepCache") translateDeepCache(held);
  saved.widgets_values = today.map((name) => held[name]);
  const gone = names.filter((name, at) => at < values.length && !today.includes(name));
  console.info(`Accel: ${type} of an earlier version: inputs that it no longer has are ignored: ${gone.join(", ")}`);
  const isGone = ({ name }) => names.includes(name) && !today.includes(name);
  saved.inputs = saved.inputs?.filter((input) => input.link != null || !isGone(input));
}

function translateDeepCache(held) {
  held.quality = QUALITIES[held.quality] ?? (held.interval > 3 ? "Fast" : "Balanced");
  held.start_percent ??= 0;
  held.end_percent ??= 1;
  if (held.interval === 1) held.end_percent = held.start_percent; // it was off
}
