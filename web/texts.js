/** The pack's own sentences in the page's language: `accelPanel` of locales/LANGUAGE/main.json, as /i18n gives it. */

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
  const wanted = language();
  const tried = [wanted, wanted.split("-")[0], FALLBACK];
  const found = tried.map((name) => languages[name]?.accelPanel?.[key]).find((text) => typeof text === "string");
  return (found ?? key).replace(/\{(\w+)\}/g, (whole, name) => (name in values ? String(values[name]) : whole));
}
