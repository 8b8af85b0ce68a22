/** How much of a budget is used: a bar with both numbers beside it. */

import { h, setAttribute, setText, show } from "./dom.js";
import { t } from "./texts.js";

/** key: of the sentences for its name and tooltip */
export function budgetBar(key) {
  const numbers = h("span", { class: "accel-numbers" });
  const part = h("div", { class: "accel-bar-part" });
  const bar = h("div", { class: "accel-bar", role: "meter", "aria-label": t(key), "aria-valuemin": 0 }, part);
  const line = h("div", { class: "accel-line" }, h("span", { class: "accel-muted", text: t(key) }), numbers);
  const element = h("div", { class: "accel-budget", title: t(`${key}Tip`) }, line, bar);

  /** format: of both numbers; without a limit there is no bar */
  function update(used, limit, format) {
    const isLimited = limit > 0;
    const text = isLimited ? t("usedOf", { used: format(used), limit: format(limit) }) : format(used);
    setText(numbers, text);
    show(bar, isLimited);
    if (!isLimited) return;
    const fraction = Math.min(1, (used ?? 0) / limit);
    part.style.width = `${100 * fraction}%`;
    part.classList.toggle("accel-nearly-full", fraction > 0.9);
    setAttribute(bar, "aria-valuemax", limit);
    setAttribute(bar, "aria-valuenow", used ?? 0);
    setAttribute(bar, "aria-valuetext", text);
  }

  return { element, update };
}
