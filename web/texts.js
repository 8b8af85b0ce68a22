/** The panel's texts and reasons in the page's language: locales/LANGUAGE/main.json, as /i18n gives it. */

import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";

const FALLBACK = "en";

let loading = null;
let languages = {};
let current = null;

/** Fetch the sentences, once; resolves when `t` can be used. Until then, and where this fails, `t` gives its key. */
export function loadTexts() {
  loading ??= api
    .fetchApi("/i18n")
    .then((answer) => (answer.ok ? answer.json() : {}))
    .then((found) => {
      languages = found ?? {};
    })
    .catch(() => {
      loading = null; // the next one tries again
    });
  return loading;
}

/** The page's language, such as "en" or "zh-TW". */
export function language() {
  return current ?? app.extensionManager?.setting?.get?.("Comfy.Locale") ?? (navigator.language || FALLBACK);
}

/** Call `listener()` whenever the person chooses another language, until the function returned is called. */
export function onLanguage(listener) {
  const changed = (event) => {
    current = event.detail?.value ?? null; // the setting itself changes only after this event
    listener();
  };
  app.ui?.settings?.addEventListener?.("Comfy.Locale.change", changed);
  return () => app.ui?.settings?.removeEventListener?.("Comfy.Locale.change", changed);
}

/** The sentence of a key, `{name}` replaced by values[name]. */
export function t(key, values = {}) {
  return filled(sentence("accelPanel", key) ?? key, values);
}

/** The sentence of a reason {code, fields, reason}; a language without its code has the server's English. */
export function reasonText({ code, fields, reason } = {}) {
  const found = sentence("accelReasons", code);
  if (found === undefined) return String(reason ?? "");
  const shown = (name, value) => (name === "quality" && sentence("accelQualities", value)) || value;
  const texts = Object.entries(fields ?? {}).map(([name, value]) => [
    name,
    value !== null && typeof value === "object" ? reasonText(value) : shown(name, value),
  ]);
  return filled(found, Object.fromEntries(texts));
}

/** A choice of a node's input, as the page shows it; what is sent and saved stays English. */
export const choiceText = (choice) => sentence("accelChoices", choice) ?? String(choice ?? "");

/** How far a compilation is, such as "generating code", or that it is the last; null where the server does not say. */
export const stageText = ({ stage, stops }) => (stops ? t("stopsAfterThis") : stage ? t(`stage_${stage}`) : null);

/** Reasons in a row: the line of a node, or what a run gained. */
export const lineText = (reasons) => reasons.map(reasonText).join(" · ");

function sentence(part, key) {
  const wanted = language();
  const tried = [wanted, wanted.split(/[-_]/)[0], FALLBACK];
  return tried.map((name) => languages[name]?.[part]?.[key]).find((text) => typeof text === "string");
}

const filled = (text, values) =>
  text.replace(/\{(\w+)\}/g, (whole, name) => (Object.hasOwn(values, name) ? String(values[name]) : whole));
