/** What will be accelerated on this machine, and what to do for the rest, as the command `doctor` says it. */

import { fold, h, show } from "./dom.js";
import { reasonText, t } from "./texts.js";

export function machineSection() {
  const facts = h("dl", { class: "accel-facts" });
  const element = fold("machine", t("machine"), t("machineTip"), facts);

  function update({ state }) {
    const parts = state?.machine ?? [];
    show(element, parts.length > 0);
    facts.replaceChildren(...parts.flatMap(row));
  }

  return { elements: [element], update };
}

function row(part) {
  return [h("dt", { text: t(`machine_${part.name}`) }), h("dd", { text: reasonText(part) })];
}
