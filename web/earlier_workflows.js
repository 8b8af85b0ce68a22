/** Workflows that an earlier build saved: what their DeepCache nodes held, as today's inputs. */

const QUALITIES = { "40 dB (hard to see)": "Balanced", "32 dB (small changes)": "Fast", "50 dB (same picture)": "50 dB" };
/** Widgets then: interval, depth, start, end, schedule, threshold, between, quality. */
const QUALITY = 7;
const GONE = ["interval", "depth", "schedule", "threshold", "between"];

/** Change what a saved DeepCache node holds, before the page makes the node of it. */
export function bringUpToDate(saved) {
  const values = saved.widgets_values;
  if (!Array.isArray(values) || typeof values[0] !== "number") return;
  const [interval, , start = 0, end = 1] = values;
  const quality = QUALITIES[values[QUALITY]] ?? (interval > 3 ? "Fast" : "Balanced");
  saved.widgets_values = [quality, start, interval === 1 ? start : end]; // at interval 1 it was off
  if (saved.inputs) saved.inputs = saved.inputs.filter(({ name, link }) => link != null || !GONE.includes(name));
}
