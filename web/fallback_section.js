/** What ran uncompiled, and why. */

import { fold, h, show } from "./dom.js";
import { reasonList } from "./reason_list.js";
import { reasonText, t } from "./texts.js";

export function fallbackSection() {
  const list = reasonList();
  const hint = h("p", { class: "accel-muted", text: t("fallbacksHint") });
  const element = fold("fallbacks", t("fallbacks"), t("fallbacksTip"), hint, ...list.elements);

  function update({ state }) {
    const rows = state?.graph_cache?.fallbacks ?? [];
    show(element, rows.length > 0);
    list.update(rows.map((row) => ({ block: row.block, reason: reasonText(row), number: row.calls })));
  }

  return { elements: [element], update };
}
