/** What ran uncompiled, and why. */

import { h, show } from "./dom.js";
import { reasonList } from "./reason_list.js";
import { reasonText, t } from "./texts.js";

export function fallbackSection() {
  const list = reasonList();
  const heading = h("h3", { text: t("fallbacks"), title: t("fallbacksTip") });
  const hint = h("p", { class: "accel-muted", text: t("fallbacksHint") });
  const element = h("section", { class: "accel-section", hidden: true }, heading, hint, ...list.elements);

  function update({ state }) {
    const rows = state?.graph_cache?.fallbacks ?? [];
    show(element, rows.length > 0);
    list.update(rows.map((row) => ({ block: row.block, reason: reasonText(row), number: row.calls })));
  }

  return { elements: [element], update };
}
