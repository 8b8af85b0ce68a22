/** Turning CUDA graphs on or off, which is offered on a node and in the panel, and counts from the next start on. */

import { isConfirmed } from "./commands.js";
import { button, fold, h, setText, show } from "./dom.js";
import { feed } from "./feed.js";
import { change, findManager, isFine, restart } from "./server.js";
import { reasonText, t } from "./texts.js";
import { toast, toastFailure } from "./toasts.js";

const NOTHING_TO_CHOOSE = ["graphs_nowhere", "graphs_given"];

const listeners = new Set();
let wasOpened = false;

/** Whether somebody has answered the offer, here or on another page. */
export let isAnswered = false;

/** Whether there is something to choose, and nobody has; of what the state says. */
export const isOffered = ({ code, choice } = {}) => code === "graphs_off" && choice === "ask";

/** Call `listener()` once that is so. */
export const onAnswer = (listener) => listeners.add(listener);

/** The choice that the server has. */
export function noteChoice(choice) {
  if (isAnswered || choice === undefined || choice === "ask") return;
  isAnswered = true;
  for (const listener of listeners) listener();
}

async function choose(choice, buttons) {
  for (const each of buttons) each.disabled = true;
  const answer = await change({ cuda_graphs: choice });
  for (const each of buttons) each.disabled = false;
  if (!isFine(answer)) return toastFailure("settingRefused", answer);
  noteChoice(choice);
  feed.refresh();
  if (choice === "on") restartBy(await findManager());
}

/** Restart ComfyUI; say what is left to do where there is no manager, or it or the person declines. */
async function restartBy(manager) {
  const isAgreed = manager && (await isConfirmed(t("graphsTurnedOn"), t("restartQuestion"), "default"));
  const answer = isAgreed && (await restart(manager));
  if (!answer || (answer.status && !isFine(answer))) toast("success", t("graphsTurnedOn"), t("graphsRestart"));
}

/** Buttons for what can be chosen. choice: the one that counts now */
export function graphsButtons(choice) {
  const make = (label, wanted) => button(label, () => choose(wanted, buttons), { title: t("graphsOfferTip") });
  const buttons = choice === "on" ? [make(t("graphsTurnOff"), "off")] : [make(t("graphsTurnOn"), "on")];
  if (choice === "ask") buttons.push(make(t("graphsDecline"), "off"));
  return buttons;
}

export function graphsSection() {
  const said = h("p", { role: "status" });
  const buttons = h("div", { class: "accel-buttons" });
  const element = fold("graphs", t("graphs"), t("graphsTip"), said, buttons);
  let drawn = null;

  function update({ state }) {
    const graphs = state?.cuda_graphs;
    show(element, Boolean(graphs) && !NOTHING_TO_CHOOSE.includes(graphs.code));
    if (element.hidden) return;
    setText(said, isOffered(graphs) ? t("graphsOffer") : reasonText(graphs));
    if (isOffered(graphs) && !wasOpened) wasOpened = element.open = true;
    const choice = graphs.by_environment ? "" : graphs.choice;
    if (drawn !== choice + graphs.code) draw(choice, graphs.code);
  }

  async function draw(choice, code) {
    const hadFocus = buttons.contains(document.activeElement);
    buttons.replaceChildren(...(choice ? graphsButtons(choice) : []));
    if (hadFocus) buttons.firstElementChild?.focus();
    drawn = choice + code;
    const manager = code === "graphs_restart" && (await findManager());
    if (manager && drawn === choice + code) buttons.append(button(t("restart"), () => restartBy(manager)));
  }

  return { elements: [element], update };
}
