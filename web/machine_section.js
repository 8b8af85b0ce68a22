/** What will be accelerated on this machine, and what to do for the rest, as the command `doctor` says it. */

import { fold, h, show } from "./dom.js";
import { t } from "./texts.js";

export function machineSection() {
  const facts = h("dl", { class: "accel-facts" });
  const element = fold("machine", t("machine"), t("machineTip"), facts);

  function update({ state }) {
    const lines = state?.machine ?? [];
    show(element, lines.length > 0);
    facts.replaceChildren(...lines.flatMap(row));
  }

  return { elements: [element], update };
}

/** "CUDA graphs: yes" as a term and what is said of it. */
function row(line) {
  const [name, ...said] = line.split(": ");
  return [h("dt", { text: name }), h("dd", { text: said.join(": ") })];
}
