/** Requests to the pack's routes. None of them throws: a server without them, or none at all, is an answer too. */

import { api } from "../../scripts/api.js";

/** `{status, data}`; status 0: the server did not answer. data: its JSON, else its text, else null. */
async function ask(path, options) {
  try {
    const answer = await api.fetchApi(path, options);
    const text = await answer.text();
    return { status: answer.status, data: parsed(text) };
  } catch {
    return { status: 0, data: null };
  }
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return text || null;
  }
}

function post(path, body = {}) {
  const headers = { "Content-Type": "application/json" };
  return ask(path, { method: "POST", headers, body: JSON.stringify(body) });
}

export const isFine = ({ status }) => status >= 200 && status < 300;

/** Why there is no answer: the server has no such route, or is not there. A key of a sentence. */
export const problemOf = ({ status }) => (status === 404 ? "missing" : "unreachable");

/** What the server said went wrong, if it said so in a sentence. */
export const complaint = ({ data }) => (typeof data?.error === "string" ? data.error : null);

/** rows: at most so many of the cache's table, last used first */
export const fetchState = (rows) => ask(`/accel/state?rows=${rows}`, { cache: "no-store" });

export const evict = (id) => post("/accel/evict", { id });
export const clear = () => post("/accel/clear");
export const change = (settings) => post("/accel/settings", settings);

/** Where ComfyUI-Manager answers, which can restart ComfyUI; null where there is none. */
export async function findManager() {
  for (const path of ["/v2/manager", "/manager"]) if (isFine(await ask(`${path}/version`))) return path;
  return null;
}

/** Restart ComfyUI, which may end before it answers. Older managers know GET alone. */
export async function restart(manager) {
  const answer = await post(`${manager}/reboot`);
  return answer.status === 405 ? ask(`${manager}/reboot`) : answer;
}

export const fetchReport = () => ask("/accel/report", { cache: "no-store" });

/** What a prompt has come to, once it has; undefined where it was taken out of the queue, or the server is gone. */
export async function fetchOutcome(id) {
  for (let unanswered = 0; unanswered < 6; ) {
    const queue = await ask("/queue", { cache: "no-store" }); // first: what has left it by then is in the history
    const found = (await ask(`/history/${id}`, { cache: "no-store" })).data?.[id];
    const isQueued = Object.values(queue.data ?? {}).flat().some((item) => item?.[1] === id);
    if (found || (isFine(queue) && !isQueued)) return found;
    unanswered = isFine(queue) ? 0 : unanswered + 1;
    await new Promise((done) => setTimeout(done, 500));
  }
}

/** Pack → names of its templates; empty where the server does not answer. */
export async function fetchTemplates() {
  const answer = await ask("/workflow_templates");
  return (isFine(answer) && answer.data) || {};
}

/** A template's workflow; null where there is none. */
export async function fetchTemplate(pack, name) {
  const answer = await ask(`/workflow_templates/${encodeURIComponent(pack)}/${encodeURIComponent(name)}.json`);
  return isFine(answer) && answer.data !== null && typeof answer.data === "object" ? answer.data : null;
}
