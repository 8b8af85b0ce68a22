/** Settings in the page's dialog. The server's values are the true ones: shown at start, and again if it refuses. */

import { app } from "../../scripts/app.js";
import { noteChoice } from "./cuda_graphs.js";
import { feed } from "./feed.js";
import * as server from "./server.js";
import { loadTexts } from "./texts.js";
import { toastFailure } from "./toasts.js";

const PAUSE = 400; // milliseconds; a held button changes a number many times

const MEGABYTES = { type: "number", attrs: { min: 0, max: 1_048_576, step: 256 }, defaultValue: 2048 };
const ENTRIES = { type: "number", attrs: { min: 0, max: 65_536, step: 16 }, defaultValue: 512 };
const LEVELS = { type: "combo", options: ["quiet", "normal", "debug"], defaultValue: "normal" };
const SWITCH = { type: "boolean", defaultValue: false };
const GROUPS = { Cache: "Graph cache", Store: "Saved graphs" };

/** of: the server's name. The page takes texts from locales/LANGUAGE/settings.json, a tooltip where one is here. */
export const SETTINGS = [
  { id: "Accel.Models.WeightsInPlace", of: "weights_in_place", name: "Keep accelerated models fully on the GPU", ...SWITCH },
  { id: "Accel.Log.Verbosity", of: "verbosity", name: "Log level", ...LEVELS },
  { id: "Accel.Store.MaxMB", of: "store_mb", name: "Disk limit (MB)", ...MEGABYTES },
  { id: "Accel.Cache.MaxEntries", of: "max_entries", name: "Compiled parts kept in memory", ...ENTRIES },
  { id: "Accel.Cache.MaxMB", of: "max_mb", name: "Memory limit (MB)", ...MEGABYTES },
].map((setting) => {
  const [accel, group, name] = setting.id.split(".");
  const onChange = (value, old) => changed(setting, value, old);
  return { ...setting, tooltip: setting.name, category: [accel, GROUPS[group] ?? group, name], onChange };
});

let isReady = false;
let truth = {};
let wanted = {};
let timer = null;

const read = async () => take((await server.fetchState(0)).data?.settings);

/** Show the server's values; once, when the page is set up. A server without settings changes nothing. */
export async function startSettings() {
  await read();
  isReady = true;
  feed.onMessage(({ event }) => event === "cache_changed" && timer === null && read());
}

async function take(values) {
  truth = { ...truth, ...values };
  noteChoice(truth.cuda_graphs);
  for (const { id, of } of SETTINGS) {
    const value = truth[of];
    const isKnown = value !== undefined && value !== null;
    if (isKnown && app.extensionManager.setting.get(id) !== value) await app.extensionManager.setting.set(id, value);
  }
}

/** The page calls this for each setting when it is registered too, and for what we set ourselves. */
function changed({ of: name }, value, old) {
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
  if (server.isFine(answer)) return take({ ...asked, ...answer.data?.settings });
  await loadTexts();
  toastFailure("settingRefused", answer);
  await take(truth);
}
