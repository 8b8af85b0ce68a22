/** The page's toasts, and the one that says once why something runs uncompiled. */

import { app } from "../../scripts/app.js";
import { count } from "./format.js";
import { complaint, problemOf } from "./server.js";
import { loadTexts, reasonText, t } from "./texts.js";

const LIFE = 12_000; // milliseconds
const GATHER = 800; // milliseconds: what falls back for one cause does so within the same step
const MOST_KNOWN = 500;

const shown = new Set();
let waiting = [];

/** severity: success, info, warn or error */
export function toast(severity, summary, detail) {
  app.extensionManager?.toast?.add?.({ severity, summary, detail, life: LIFE });
}

/** A toast for a request that failed: what the server said about it, else why it said nothing. key: of the summary */
export function toastFailure(key, answer) {
  toast("error", t(key), complaint(answer) ?? t(problemOf(answer)));
}

let toldOf = null; // the last prompt of which this was told

/** Say that a prompt's model is compiled, where no node shows that: in an app, say, or outside of the window. */
export function tellCompiling({ prompt_id: prompt }) {
  if (toldOf === prompt) return;
  toldOf = prompt;
  setTimeout(async () => {
    await loadTexts();
    const shown = [...document.querySelectorAll(".accel-node-text, .accel-panel")];
    if (!shown.some((element) => element.textContent && element.checkVisibility?.()))
      toast("info", t("compilingToast"), t("compilingHint"));
  }, GATHER);
}

/** Show a toast for a fallback {block, code, fields, reason, of_all}, once a reason; many at once become one. */
export function tellFallback(fallback) {
  const key = String(fallback.reason ?? "").replace(/\d+/g, "#");
  if (shown.has(key) || shown.size >= MOST_KNOWN) return;
  shown.add(key);
  if (!waiting.length) setTimeout(tellWaiting, GATHER);
  waiting.push(fallback);
}

/** The reason as the beginning of a sentence, whatever it ends with. */
const clause = (fallback) => reasonText(fallback).replace(/\.+$/, "");

async function tellWaiting() {
  await loadTexts();
  const now = waiting;
  waiting = [];
  const told = now.find((fallback) => fallback.of_all) ?? now[0];
  const detail = told.of_all ? "nothingCompiledDetail" : now.length > 1 ? "fallbackManyDetail" : "fallbackDetail";
  const values = { number: count(now.length), block: told.block, reason: clause(told) };
  toast("warn", t(told.of_all ? "nothingCompiledToast" : "fallbackToast"), t(detail, values));
}
