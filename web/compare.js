/** The open workflow's image with our nodes and without: both times, how alike they are, and both side by side. */

import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";
import { button, h } from "./dom.js";
import { seconds } from "./format.js";
import { fetchOutcome, fetchState } from "./server.js";
import { loadTexts, t } from "./texts.js";
import { toast } from "./toasts.js";

const PAID = 0.1; // of its time the first image may have loaded and compiled to be the one that is timed
const MOST_MORE = 2; // images, while code is still made beside them
const ALIKE = 40; // decibels from which a difference is hard to see
const OURS = /^Accel(SpeedUp|Model|DeepCache|ControlNet|TextEncoder|VAESkipCompile|WarmUpGraphs)$/;

/** Whether nodes of this class change how fast an image is made. */
export const isOurs = (name) => OURS.test(name);

let isMaking = false;

/** Make the image with our nodes and without, of one seed, and show both. The graph stays as it is. */
export async function compareWithPlain() {
  await loadTexts();
  if (isMaking) return toast("info", t("compare"), t("comparing"));
  isMaking = true;
  try {
    const [open, { output, workflow }] = [findOpen(), await app.graphToPrompt()];
    const { others, readers } = bypassOurs(output);
    if (!readers.length) return toast("warn", t("compare"), t("nothingToCompare"));
    toast("info", t("compare"), t("comparing"));
    const makeOf = (prompt) => make(prompt, readers, workflow, open);
    let fast = await makeOf(output);
    const plain = await makeOf(others);
    const isFirst = fast.isWarm && !fast.isEarly;
    if (!isFirst) fast = await makeOf(output);
    for (let more = MOST_MORE; more && fast.isEarly; more--) fast = await makeOf(output);
    await showBoth(output, plain, fast, fast.isEarly ? "comparedEarly" : isFirst ? "comparedFirst" : "comparedAgain");
  } catch (error) {
    toast("error", t("compare"), error.message);
  } finally {
    isMaking = false;
  }
}

const findOpen = () => app.extensionManager?.workflow?.activeWorkflow;

/**
 * others: a prompt in which our nodes are bypassed; what read their outputs reads what they were given. readers: the
 * ids of what does: all behind them is compared, and nothing else need be made anew.
 */
function bypassOurs(prompt) {
  const given = (value) => {
    const { class_type: name, inputs } = (Array.isArray(value) && prompt[value[0]]) || {};
    if (!isOurs(name)) return value;
    return given(inputs[window.LiteGraph.registered_node_types[name].nodeData.output[value[1]].toLowerCase()]);
  };
  const others = Object.entries(structuredClone(prompt)).filter(([, node]) => !isOurs(node.class_type));
  const readers = others.filter(([, { inputs }]) => Object.values(inputs).some((value) => given(value) !== value));
  for (const [, { inputs }] of readers) for (const name in inputs) inputs[name] = given(inputs[name]);
  return { others: Object.fromEntries(others), readers: readers.map(([id]) => id) };
}

/**
 * {took, outputs, isWarm, isEarly} of a prompt that makes anew all behind `readers`, whatever core has cached. isEarly:
 * its code was still being compiled. Save Image saves nothing; other savers still save. Throws an Error.
 */
async function make(prompt, readers, workflow, open) {
  if (findOpen() !== open) throw new Error(t("compareStopped"));
  const output = structuredClone(prompt);
  for (const node of Object.values(output)) if (node.class_type === "SaveImage") node.class_type = "PreviewImage";
  for (const id of readers) output[id].inputs.accel_compared = `${Date.now()}`; // unknown to it, but core caches by it
  const { prompt_id: id } = await api.queuePrompt(0, { output, workflow });
  const { status, outputs } = (await fetchOutcome(id)) ?? {};
  if (status?.status_str !== "success") throw new Error(t("compareStopped"));
  const timeOf = (name) => status.messages.find(([event]) => event === name)[1].timestamp;
  const took = (timeOf("execution_success") - timeOf("execution_start")) / 1000;
  const { prompt: last, account, prepare_seconds: prepared, fallbacks } = (await fetchState(0)).data?.last_run ?? {};
  const isEarly = last === id && fallbacks.some(({ code }) => code === "compiling_beside");
  return { took, outputs, isWarm: last === id && account.paid + prepared < PAID * took, isEarly };
}

async function showBoth(prompt, plain, fast, note) {
  const ids = Object.keys(plain.outputs).filter((id) => [plain, fast].every((made) => made.outputs[id]?.images?.length));
  const last = (name) => ids.findLast((id) => prompt[id]?.class_type === name);
  const id = last("SaveImage") ?? last("PreviewImage") ?? ids.at(-1);
  const address = ({ outputs }) => api.apiURL(`/view?${new URLSearchParams(outputs[id].images.at(-1))}`);
  const images = [plain, fast].map((made) => id && h("img", { src: address(made) }));
  const figure = (index, key, { took }) =>
    h("figure", {}, images[index], h("figcaption", { text: `${t(key)}: ${seconds(took)}` }));
  await Promise.all(images.map((image) => image?.decode())).catch(() => images.fill(null)); // it is a video, say
  const facts = [t("timesAsFast", { times: (plain.took / fast.took).toFixed(2) }), describeDifference(...images)];
  const dialog = h(
    "dialog",
    { class: "accel-compare", "aria-label": t("compare"), autofocus: true, on: { close: () => dialog.remove() } },
    h("p", { text: facts.filter(Boolean).join(" · ") }),
    h("div", {}, figure(0, "plain", plain), figure(1, "accelerated", fast)),
    h("p", { text: t(note) }),
    button(t("close"), () => dialog.close()),
  );
  document.body.append(dialog);
  dialog.showModal();
}

/** How alike two images are, by their PSNR; null where there are none of one size. */
function describeDifference(one, other) {
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
