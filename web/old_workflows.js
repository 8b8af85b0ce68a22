/** Workflows that an earlier version saved: its inputs that are no more are left out of the values of a node. */

/** Class → how its values were saved. isOld(values); keep: the places of the values that are still there. */
const EARLIER = {
  // shapes, backend, on_trouble, min_repetitions, check_gain, cache_mb, graphs
  AccelModel: { isOld: (values) => typeof values[3] === "number", keep: [0, 1, 2, 4, 6] },
};

/** Correct a node's saved form in place, before the page reads it. */
export function bringUpToDate(saved) {
  const earlier = EARLIER[saved?.type];
  const values = saved?.widgets_values;
  if (!earlier || !Array.isArray(values) || !earlier.isOld(values)) return;
  saved.widgets_values = earlier.keep.filter((place) => place < values.length).map((place) => values[place]);
}
