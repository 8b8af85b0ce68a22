/** The open workflow's image with our nodes and without: both times, how alike they are, and both side by side. */

import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";
import { button, h } from "./dom.js";
import { seconds } from "./format.js";
import { fetchOutcome, fetchState } from "./server.js";
import { loadTexts, t } from "./texts.js";
import { toast } from "./toasts.js";

const WARM = 0.9; // of its time the first image must have sampled to be the one that is timed
const ALIKE = 40; // decibels from which a difference is hard to see

/** Whether nodes of this class change how fast an image is made. */
export const isOurs = (name) => Boolean(name?.startsWith("Accel")) && !name.includes("Resolution");

let isMaking = false;

/** Make the image with our nodes and without, of one seed, and show both. The graph stays as it is. */
export async function compareWithPlain() {
  await loadTexts();
  const { output, workflow } = await app.graphToPrompt();
  const nodes = Object.values(output);
  if (isMaking) return;
  if (!nodes.some(({ class_type: name }) => isOurs(name)) || !nodes.some(isSampler))
    return toast("warn", t("compare"), t("nothingToCompare"));
  isMaking = true;
  toast("info", t("compare"), t("comparing"));
  try {
    const first = await make(output, workflow);
    const { prompt, account } = (await fetchState(0)).data?.last_run ?? {};
    const isWarm = prompt === first.id && account.worked > WARM * first.took;
    const plain = await make(withoutOurs(output), workflow);
    showBoth(plain, isWarm ? first : await make(output, workflow), isWarm);
  } catch (error) {
    toast("error", t("compare"), error.message);
  }
  isMaking = false;
}

const isSampler = ({ inputs }) => "seed" in inputs || "noise_seed" in inputs;

/** A prompt in which our nodes are bypassed: what read their outputs reads what they were given. */
function withoutOurs(prompt) {
  const given = (value) => {
    const { class_type: name, inputs } = (Array.isArray(value) && prompt[value[0]]) || {};
    if (!isOurs(name)) return value;
    const type = window.LiteGraph.registered_node_types[name].nodeData.output[value[1]].toLowerCase();
    return given(inputs[type] ?? inputs.anything);
  };
  const others = Object.entries(structuredClone(prompt)).filter(([, node]) => !isOurs(node.class_type));
  for (const [, node] of others)
    node.inputs = Object.fromEntries(Object.entries(node.inputs).map(([name, value]) => [name, given(value)]));
  return Object.fromEntries(others);
}

/** {id, took, image} of a prompt that samples anew, whatever core has cached, and saves nothing. Throws an Error. */
async function make(prompt, workflow) {
  const output = structuredClone(prompt);
  for (const node of Object.values(output)) {
    if (node.class_type === "SaveImage") node.class_type = "PreviewImage";
    if (isSampler(node)) node.inputs.accel_compared = `${Date.now()}`; // no input of it, but part of what core caches by
  }
  const { prompt_id: id } = await api.queuePrompt(0, { output, workflow });
  const { status, outputs } = (await fetchOutcome(id)) ?? {};
  if (status?.status_str !== "success") throw new Error(t("compareStopped"));
  const [begun, ended] = ["execution_start", "execution_success"].map(
    (name) => status.messages.find(([event]) => event === name)[1].timestamp,
  );
  const saved = Object.values(outputs).flatMap(({ images }) => images ?? []);
  return { id, took: (ended - begun) / 1000, image: saved.length ? await load(saved.at(-1)) : null };
}

async function load(file) {
  const image = h("img", { src: api.apiURL(`/view?${new URLSearchParams(file)}`) });
  await image.decode();
  return image;
}

function showBoth(plain, fast, isWarm) {
  const caption = (key, took) => h("figcaption", { text: `${t(key)}: ${seconds(took)}` });
  const figure = ({ took, image }, key) => h("figure", {}, image, caption(key, took));
  const close = button(t("close"), () => dialog.close());
  const facts = [t("timesAsFast", { times: (plain.took / fast.took).toFixed(2) }), describeDifference(plain, fast)];
  const dialog = h(
    "dialog",
    { class: "accel-compare", "aria-label": t("compare"), autofocus: true, on: { close: () => dialog.remove() } },
    h("p", { text: facts.filter(Boolean).join(" · ") }),
    h("div", {}, figure(plain, "plain"), figure(fast, "accelerated")),
    h("p", { text: t(isWarm ? "comparedFirst" : "comparedAgain") }),
    close,
  );
  document.body.append(dialog);
  dialog.showModal();
}

/** How alike two images are, by their PSNR; null where there are none of one size. */
function describeDifference({ image: one }, { image: other }) {
  if (one?.naturalWidth !== other?.naturalWidth || one?.naturalHeight !== other?.naturalHeight || !one) return null;
  const [before, after] = [one, other].map((image) => {
    const paint = h("canvas", { width: image.naturalWidth, height: image.naturalHeight }).getContext("2d");
    paint.drawImage(image, 0, 0);
    return paint.getImageData(0, 0, image.naturalWidth, image.naturalHeight).data;
  });
  const squares = before.reduce((sum, value, index) => sum + (value - after[index]) ** 2, 0);
  const decibels = 10 * Math.log10((255 ** 2 * 0.75 * before.length) / squares); // a quarter is opacity
  if (!squares) return t("equalImages");
  return t(decibels >= ALIKE ? "alikeImages" : "differentImages", { decibels: decibels.toFixed(1) });
}
