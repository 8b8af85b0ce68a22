/** Settings in the page's dialog. The server's values are the true ones: shown at start, and again if it refuses. */

import { app } from "../../scripts/app.js";
import { noteChoice } from "./cuda_graphs.js";
import { feed } from "./feed.js";
import * as server from "./server.js";
import { loadTexts } from "./texts.js";
import { toastFailure } from "./toasts.js";

const PAUSE = 400; // milliseconds; a held button changes a number many times

/** Setting's id → the server's name for it. */
const NAMES = {
  "Accel.Cache.MaxMB": "max_mb",
  "Accel.Cache.MaxEntries": "max_entries",
  "Accel.Store.MaxMB": "store_mb",
  "Accel.Log.Verbosity": "verbosity",
  "Accel.Models.WeightsInPlace": "weights_in_place",
};

/** English here; the page takes other languages from locales/LANGUAGE/settings.json. */
export const SETTINGS = [
  {
    id: "Accel.Models.WeightsInPlace",
    category: ["Accel", "Models", "WeightsInPlace"],
    name: "Keep accelerated models fully on the GPU",
    tooltip:
      "Where ComfyUI streams weights (DynamicVRAM): load each accelerated model once more, whole, so that its weights " +
      "stay on the GPU. For models that fit into its memory; takes effect when a node runs next.",
    type: "boolean",
    defaultValue: false,
  },
  {
    id: "Accel.Log.Verbosity",
    category: ["Accel", "Log", "Verbosity"],
    name: "Log level",
    tooltip: "quiet: errors only. normal: what is compiled and what is not. debug: each lookup with its reason.",
    type: "combo",
    options: ["quiet", "normal", "debug"],
    defaultValue: "normal",
  },
  {
    id: "Accel.Store.MaxMB",
    category: ["Accel", "Saved graphs", "MaxMB"],
    name: "Disk limit (MB)",
    tooltip: "How much disk space saved graphs may take, so that a restart compiles nothing. 0 saves none.",
    type: "number",
    attrs: { min: 0, max: 1_048_576, step: 256 },
    defaultValue: 2048,
  },
  {
    id: "Accel.Cache.MaxEntries",
    category: ["Accel", "Graph cache", "MaxEntries"],
    name: "Compiled parts kept in memory",
    tooltip: "How many block types stay compiled; the least recently used goes first. A model has 5 to 30.",
    type: "number",
    attrs: { min: 0, max: 65_536, step: 16 },
    defaultValue: 512,
  },
  {
    id: "Accel.Cache.MaxMB",
    category: ["Accel", "Graph cache", "MaxMB"],
    name: "Memory limit (MB)",
    tooltip: "How much memory compiled graphs may take. 2048 is plenty for most; lower it when memory is short.",
    type: "number",
    attrs: { min: 0, max: 1_048_576, step: 256 },
    defaultValue: 2048,
  },
].map((setting) => ({ ...setting, onChange: (value, old) => changed(setting.id, value, old) }));

let isReady = false;
let truth = {};
let wanted = {};
let timer = null;

/** Show the server's values; once, when the page is set up. A server without settings changes nothing. */
export async function startSettings() {
  const answer = await server.fetchState(0);
  if (server.isFine(answer) && answer.data?.settings) await take(answer.data.settings);
  isReady = true;
  feed.onMessage(async ({ event }) => {
    if (event !== "cache_changed" || timer !== null) return;
    const { data } = await server.fetchState(0);
    if (data?.settings) await take(data.settings);
  });
}

async function take(values) {
  truth = { ...truth, ...values };
  noteChoice(truth.cuda_graphs);
  for (const [id, name] of Object.entries(NAMES)) {
    const value = truth[name];
    const isKnown = value !== undefined && value !== null;
    if (isKnown && app.extensionManager.setting.get(id) !== value) await app.extensionManager.setting.set(id, value);
  }
}

/** The page calls this for each setting when it is registered too, and for what we set ourselves. */
function changed(id, value, old) {
  const name = NAMES[id];
  if (!isReady || old === undefined || value === truth[name]) return;
  if (value === null || Number.isNaN(value)) value = truth[name]; // the field was emptied
  wanted[name] = value;
  clearTimeout(timer);
  timer = setTimeout(send, PAUSE);
}

async function send() {
  timer = null;
  const asked = wanted;
  wanted = {};
  const answer = await server.change(asked);
  if (server.isFine(answer)) {
    await take({ ...asked, ...(answer.data?.settings ?? {}) });
    return;
  }
  await loadTexts();
  toastFailure("settingRefused", answer);
  await take(truth);
}
