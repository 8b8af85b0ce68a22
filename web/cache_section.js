/** The graph cache: how full it is, and its entries, the last used first. */

import { budgetBar } from "./budget_bar.js";
import { COLUMNS, keyOf, makeRow, updateRow } from "./cache_rows.js";
import { clearCache } from "./commands.js";
import { fold, h, iconButton, reconcile, setAttribute, setText, show } from "./dom.js";
import { feed } from "./feed.js";
import { bytes, count, seconds } from "./format.js";
import { evict, isFine } from "./server.js";
import { t } from "./texts.js";
import { toastFailure } from "./toasts.js";

export function cacheSection() {
  const memory = budgetBar("cacheBytes");
  const entries = budgetBar("cacheEntries");
  const totals = h("p", { class: "accel-muted", title: t("totalsTip") });
  const clear = iconButton("trash", t("clear"), clearCache);
  clear.title = t("clearTip");
  const body = h("div", { role: "rowgroup" });
  const table = h("div", { class: "accel-table", role: "table", "aria-label": t("graphCache") }, headings(), body);
  const rest = h("p", { class: "accel-muted" });
  const element = fold(
    "cache",
    t("graphCache"),
    t("graphCacheTip"),
    memory.element,
    entries.element,
    h("div", { class: "accel-line" }, totals, clear),
    table,
    rest,
  );

  let cache = null;

  function update({ state }) {
    cache = state?.graph_cache ?? null;
    show(element, Boolean(cache) && (cache.entries > 0 || cache.compilations > 0 || cache.loaded > 0));
    if (!element.hidden) draw();
  }

  function draw() {
    memory.update(cache.bytes, cache.max_bytes, bytes);
    entries.update(cache.entries, cache.max_entries, count);
    const numbers = { hits: count(cache.hits), compiled: count(cache.compilations), loaded: count(cache.loaded) };
    setText(totals, t("totals", { ...numbers, evicted: count(cache.evictions), seconds: seconds(cache.seconds) }));
    const rows = (cache.table ?? []).map((row, index) => ({ row, key: keyOf(row, index) }));
    reconcile(
      body,
      rows,
      ({ key }) => key,
      ({ row }) => makeRow(row, onEvict),
      (line, { row }) => updateRow(line, row),
    );
    const all = Math.max(cache.rows_total ?? 0, rows.length);
    setAttribute(table, "aria-rowcount", all + 1);
    show(table, rows.length > 0);
    show(clear, cache.entries > 0);
    setText(rest, rows.length < all ? t("rowsOf", { shown: count(rows.length), all: count(all) }) : "");
  }

  /** The row goes; the focus moves to its neighbour, so that a keyboard keeps its place. */
  async function onEvict(id, line) {
    const neighbour = line.nextElementSibling ?? line.previousElementSibling;
    const hadFocus = line.contains(document.activeElement);
    line.classList.add("accel-leaving");
    const answer = await evict(id);
    line.classList.remove("accel-leaving");
    if (!isFine(answer)) return toastFailure("failedAction", answer);
    cache.table = cache.table?.filter((row) => row.id !== id); // or the server's message has taken it away by now
    draw();
    const next = neighbour?.isConnected ? neighbour.querySelector("button") : body.querySelector("button");
    if (hadFocus && document.activeElement === document.body) (next ?? clear).focus();
    feed.refresh();
  }

  return { elements: [element], update };
}

function headings() {
  const heading = (column, properties) => h("div", { class: `accel-cell accel-of-${column}`, ...properties });
  const named = COLUMNS.map((name) => heading(name, { role: "columnheader", title: t(`${name}Tip`), text: t(name) }));
  const actions = heading("evict", { role: "columnheader", "aria-label": t("actions") });
  return h("div", { class: "accel-row accel-head", role: "row" }, ...named, actions);
}
