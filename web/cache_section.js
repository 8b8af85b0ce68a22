/** The graph cache: how full it is, and its table, which can be filtered, sorted and emptied. */

import { budgetBar } from "./budget_bar.js";
import { COLUMNS, keyOf, makeRow, matches, sorted, updateRow } from "./cache_rows.js";
import { clearCache, evictRow } from "./commands.js";
import { button, fold, h, icon, iconButton, reconcile, setAttribute, setText, show } from "./dom.js";
import { FIRST_ROWS, MOST_ROWS, feed } from "./feed.js";
import { bytes, count, seconds } from "./format.js";
import { t } from "./texts.js";

const PAGE = 50; // rows drawn before "show more"
const TYPING = 150; // milliseconds
const SORTED_BY = Object.keys(COLUMNS).filter((column) => COLUMNS[column]);

// Kept while the page lives, so that opening the panel again shows it as it was.
const view = { column: "lastUsed", isDescending: true, drawn: PAGE };

export function cacheSection() {
  const memory = budgetBar("cacheBytes");
  const entries = budgetBar("cacheEntries");
  const totals = h("p", { class: "accel-muted", title: t("totalsTip") });
  const controls = tableControls(() => draw());
  const body = h("div", { role: "rowgroup" });
  const table = h("div", { class: "accel-table", role: "table", "aria-label": t("graphCache") }, controls.head, body);
  const rest = h("p", { class: "accel-muted" });
  const more = button(t("showMore"), showMore);
  const none = h("p", { class: "accel-muted", hidden: true, text: t("noMatch") });
  const element = fold(
    "cache",
    t("graphCache"),
    t("graphCacheTip"),
    memory.element,
    entries.element,
    h("div", { class: "accel-line" }, totals, controls.clear),
    controls.toolbar,
    table,
    none,
    h("div", { class: "accel-line" }, rest, more),
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
    const found = (cache.table ?? []).filter((row) => matches(row, feed.filter));
    const ordered = sorted(found, view.column, view.isDescending);
    const rows = ordered.slice(0, view.drawn).map((row, index) => ({ row, key: keyOf(row, index) }));
    reconcile(
      body,
      rows,
      ({ key }) => key,
      ({ row }) => makeRow(row, onEvict),
      (line, { row }) => updateRow(line, row),
    );
    const all = Math.max(cache.rows_total ?? found.length, found.length);
    setAttribute(table, "aria-rowcount", all + 1);
    show(table, rows.length > 0);
    show(none, rows.length === 0 && feed.filter !== "");
    show(controls.toolbar, cache.entries > 1 || feed.filter !== "");
    show(controls.clear, cache.entries > 0);
    setText(rest, rows.length < all ? t("rowsOf", { shown: count(rows.length), all: count(all) }) : "");
    show(more, rows.length < Math.min(all, MOST_ROWS));
    controls.update(all > (cache.table ?? []).length);
  }

  function showMore() {
    view.drawn += PAGE;
    const loaded = cache.table?.length ?? 0;
    if (view.drawn > loaded && loaded < (cache.rows_total ?? 0)) {
      feed.rows = Math.min(MOST_ROWS, feed.rows + FIRST_ROWS);
      feed.refresh();
    }
    const first = body.children.length;
    draw();
    body.children[first]?.querySelector("button")?.focus();
  }

  /** The row goes; the focus moves to its neighbour, so that a keyboard keeps its place. */
  async function onEvict(id, line) {
    const neighbour = line.nextElementSibling ?? line.previousElementSibling;
    const hadFocus = line.contains(document.activeElement);
    line.classList.add("accel-leaving");
    const isGone = await evictRow(id);
    line.classList.remove("accel-leaving");
    if (!isGone) return;
    cache.table = cache.table?.filter((row) => row.id !== id); // or the server's message has taken it away by now
    draw();
    const next = neighbour?.isConnected ? neighbour.querySelector("button") : body.querySelector("button");
    if (hadFocus && document.activeElement === document.body) (next ?? controls.clear).focus();
    feed.refresh();
  }

  return { elements: [element], update, destroy: controls.destroy };
}

/** Filter, sorting and clearing. changed(): draw again. */
function tableControls(changed) {
  let timer = null;
  const label = { placeholder: t("filter"), "aria-label": t("filter"), title: t("filterTip") };
  const events = { input: onInput };
  const filter = h("input", { class: "accel-input", type: "search", maxlength: 200, ...label, on: events });
  filter.value = feed.filter;
  const options = SORTED_BY.map((column) => h("option", { value: column, text: t(column) }));
  const select = h("select", { class: "accel-input", "aria-label": t("sortBy"), title: t("sortBy") }, ...options);
  select.addEventListener("change", () => sortBy(select.value));
  const turn = iconButton("sort-amount-down", t("turnOrder"), () => sortBy(view.column));
  const clear = iconButton("trash", t("clear"), clearCache);
  clear.title = t("clearTip");
  const head = h("div", { class: "accel-row accel-head", role: "row" });
  for (const column of Object.keys(COLUMNS)) head.append(heading(column));
  head.append(h("div", { class: "accel-cell accel-of-evict", role: "columnheader", "aria-label": t("actions") }));
  const toolbar = h("div", { class: "accel-toolbar" }, filter, h("div", { class: "accel-sort" }, select, turn));

  function heading(column) {
    const properties = { class: `accel-cell accel-of-${column}`, role: "columnheader", title: t(`${column}Tip`) };
    if (!COLUMNS[column]) return h("div", properties, t(column));
    const sorts = { type: "button", class: "accel-heading", on: { click: () => sortBy(column) } };
    return h("div", { ...properties, dataset: { column } }, h("button", sorts, t(column), icon("arrow-down")));
  }

  function onInput() {
    feed.filter = filter.value.trim();
    view.drawn = PAGE;
    changed();
    clearTimeout(timer);
    timer = setTimeout(() => feed.refresh(), TYPING);
  }

  /** The same column again turns the order. */
  function sortBy(column) {
    view.isDescending = column === view.column ? !view.isDescending : COLUMNS[column].isDescending;
    view.column = column;
    changed();
  }

  /** isPartial: the server has more rows than were asked for; it gives those used last. */
  function update(isPartial) {
    select.value = view.column;
    turn.firstChild.className = `pi pi-sort-amount-${view.isDescending ? "down" : "up-alt"}`;
    for (const cell of head.children) {
      const isSorted = cell.dataset.column === view.column;
      setAttribute(cell, "aria-sort", isSorted ? (view.isDescending ? "descending" : "ascending") : null);
      const mark = cell.querySelector("i");
      if (mark) mark.className = isSorted ? `pi pi-arrow-${view.isDescending ? "down" : "up"}` : "";
    }
    if (isPartial && feed.rows < MOST_ROWS && !(view.column === "lastUsed" && view.isDescending)) {
      feed.rows = MOST_ROWS;
      feed.refresh();
    }
  }

  return { toolbar, clear, head, update, destroy: () => clearTimeout(timer) };
}
