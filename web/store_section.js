/** What is kept on disk, so that a restart compiles nothing anew. */

import { fold, h, setText, show } from "./dom.js";
import { bytes, count, percent } from "./format.js";
import { reasonList } from "./reason_list.js";
import { t } from "./texts.js";

export function storeSection() {
  const numbers = h("p", { class: "accel-muted" });
  const folder = h("p", { class: "accel-muted accel-path", title: t("storeFolderTip") });
  const list = reasonList();
  const summary = h("summary", { text: t("storeMisses"), title: t("storeMissesTip") });
  const misses = h("details", { class: "accel-details" }, summary, ...list.elements);
  const element = fold("store", t("store"), t("storeTip"), numbers, folder, misses);

  function update({ state }) {
    const store = state?.graph_store ?? null;
    show(element, Boolean(store));
    if (!store) return;
    const known = ["saved", "loaded"].filter((key) => typeof store[key] === "number");
    const facts = known.map((key) => t(`store_${key}`, { number: count(store[key]) }));
    if (store.lookups > 0)
      facts.push(t("storeHits", { share: percent(store.loaded / store.lookups), number: count(store.lookups) }));
    if (store.limit_bytes > 0) facts.push(t("storeLimit", { limit: bytes(store.limit_bytes) }));
    setText(numbers, facts.join(" · "));
    show(folder, Boolean(store.folder));
    setText(folder, store.folder);
    const rows = store.misses ?? [];
    show(misses, rows.length > 0);
    list.update(rows.map(({ block, reason, count: number }) => ({ block, reason, number })));
  }

  return { elements: [element], update };
}
