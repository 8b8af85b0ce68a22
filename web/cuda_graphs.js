/** Turning CUDA graphs on or off, which is offered on a node and in the panel, and counts from the next start on. */

import { button, fold, h, setText, show } from "./dom.js";
import { feed } from "./feed.js";
import { change, isFine } from "./server.js";
import { reasonText, t } from "./texts.js";
import { toast, toastFailure } from "./toasts.js";

const ANSWERED = new Set();

/** Call `listener()` once somebody has answered the offer on this page. */
export const onAnswer = (listener) => ANSWERED.add(listener);

async function choose(choice) {
  const answer = await change({ cuda_graphs: choice });
  if (!isFine(answer)) return toastFailure("settingRefused", answer);
  if (choice === "on") toast("success", t("graphsTurnedOn"), t("graphsRestart"));
  for (const listener of ANSWERED) listener();
  feed.refresh();
}

/** Buttons for what can be chosen. choice: the one that counts now */
export function graphsButtons(choice) {
  if (choice === "on") return [button(t("graphsTurnOff"), () => choose("off"))];
  const no = choice === "ask" ? [button(t("graphsDecline"), () => choose("off"))] : [];
  return [button(t("graphsTurnOn"), () => choose("on")), ...no];
}

const NOTHING_TO_CHOOSE = ["graphs_nowhere", "graphs_given"];

export function graphsSection() {
  const said = h("p");
  const buttons = h("div", { class: "accel-buttons" });
  const element = fold("graphs", t("graphs"), t("graphsTip"), said, buttons);
  let drawn = null;

  function update({ state }) {
    const graphs = state?.cuda_graphs;
    show(element, Boolean(graphs) && !NOTHING_TO_CHOOSE.includes(graphs.code));
    if (element.hidden) return;
    setText(said, graphs.code === "graphs_off" && graphs.choice === "ask" ? t("graphsOffer") : reasonText(graphs));
    if (drawn === null && graphs.choice === "ask") element.open = true;
    const choice = graphs.is_named ? "" : graphs.choice;
    if (drawn !== choice) buttons.replaceChildren(...(choice ? graphsButtons(choice) : [])); // else it keeps the focus
    drawn = choice;
  }

  return { elements: [element], update };
}
