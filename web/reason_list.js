/** A list of what happened to which block, why, and how often. */

import { button, h, reconcile, setText, show } from "./dom.js";
import { count } from "./format.js";
import { t } from "./texts.js";

const FIRST = 4;
const PAGE = 50;

export function reasonList() {
  const list = h("ul", { class: "accel-list" });
  const more = button("", showMore, { hidden: true });
  let rows = [];
  let drawn = FIRST;

  /** given: {block (may be missing), reason, number}; the most frequent come first */
  function update(given) {
    rows = [...given].sort((one, other) => (other.number ?? 0) - (one.number ?? 0));
    draw();
  }

  function draw() {
    reconcile(list, rows.slice(0, drawn), (row) => `${row.block}\n${row.reason}`, makeRow, updateRow);
    show(more, rows.length > drawn);
    setText(more, t("moreReasons", { number: count(rows.length - drawn) }));
  }

  function showMore() {
    drawn += PAGE;
    draw();
  }

  return { elements: [list, more], update };
}

function makeRow() {
  const block = h("span", { class: "accel-strong accel-cut" });
  const number = h("span", { class: "accel-muted accel-numbers", title: t("timesTip") });
  const reason = h("p", { class: "accel-reason" });
  const row = h("li", {}, h("div", { class: "accel-line" }, block, number), reason);
  row.accelParts = { block, number, reason };
  return row;
}

/** Without a block, the reason is the headline. */
function updateRow({ accelParts: parts }, row) {
  setText(parts.block, row.block ?? row.reason);
  setText(parts.number, t("times", { number: count(row.number) }));
  setText(parts.reason, row.block ? row.reason : "");
  show(parts.reason, Boolean(row.block));
}
