/** The rows of the graph cache's table: a grid of cells in a wide panel, a card of three lines in a narrow one. */

import { h, iconButton, setAttribute, setText, show } from "./dom.js";
import { NOTHING, ago, bytes, count, moment, seconds, size } from "./format.js";
import { reasonText, t } from "./texts.js";

const SIZES_SHOWN = 3;

/** Where a row's graphs are from → the text for it. */
const SOURCES = { compiled: "compiledIn", traced: "tracedIn", disk: "disk", captured: "capturedIn" };

export const COLUMNS = ["name", "usedFor", "bytes", "hits", "lastUsed", "compileTime"];

export const keyOf = (row, index) => row.id ?? `${row.name} ${index}`;

/** onEvict(id, row element) */
export function makeRow(row, onEvict) {
  const cell = (name, ...children) => h("div", { class: `accel-cell accel-of-${name}`, role: "cell" }, ...children);
  const parts = {
    name: h("span", { class: "accel-strong" }),
    model: h("span", { class: "accel-muted" }),
    usedFor: cell("usedFor"),
    bytes: cell("bytes"),
    hits: cell("hits"),
    lastUsed: cell("lastUsed"),
    compileTime: cell("compileTime"),
    failure: h("div", { class: "accel-failure", role: "cell" }),
  };
  parts.hits.dataset.label = t("hits");
  const element = h("div", { class: "accel-row", role: "row" });
  parts.evict = row.id ? iconButton("times", "", () => onEvict(row.id, element)) : null;
  element.accelParts = parts;
  element.append(
    cell("name", parts.name, parts.model),
    ...COLUMNS.slice(1).map((name) => parts[name]),
    cell("evict", parts.evict),
    parts.failure,
  );
  return element;
}

export function updateRow({ accelParts: parts }, row) {
  setText(parts.name, row.name);
  setText(parts.model, [row.model, row.dtype].filter(Boolean).join(" · "));
  setAttribute(parts.model, "title", [t("nameTip"), row.device, row.backend].filter(Boolean).join("\n"));
  setText(parts.usedFor, uses(row));
  setAttribute(parts.usedFor, "title", t("usedForTip"));
  setText(parts.bytes, bytes(row.bytes));
  setAttribute(parts.bytes, "title", t("bytesTip"));
  setText(parts.hits, t("hitsNumber", { number: count(row.hits) }));
  setAttribute(parts.hits, "title", t("hitsTip"));
  setText(parts.lastUsed, ago(row.last_used));
  setAttribute(parts.lastUsed, "title", moment(row.last_used));
  const source = row.backend === "eager" ? "traced" : row.source in SOURCES ? row.source : "compiled";
  const isMade = row.graphs > 0 || !row.failure_reason;
  setText(parts.compileTime, isMade ? t(SOURCES[source], { seconds: seconds(row.seconds) }) : NOTHING);
  setAttribute(parts.compileTime, "title", t(`${source}Tip`));
  setText(parts.failure, row.failure_reason ? t("failed", { reason: reasonText(row.failure_reason) }) : "");
  show(parts.failure, Boolean(row.failure_reason));
  if (parts.evict) {
    const label = t("evict", { name: row.name });
    setAttribute(parts.evict, "aria-label", label);
    setAttribute(parts.evict, "title", t("evictTip"));
  }
}

/** What its graphs were used for last, in a line: sizes, batches, prompt lengths. */
function uses(row) {
  const used = Array.isArray(row.used_at) ? row.used_at : [];
  const kind = row.sizes === undefined ? null : t(row.sizes === "any" ? "anySize" : "exactSize");
  const sizes = different(used.map(({ latent }) => latent && size(latent)));
  const rest = sizes.length > SIZES_SHOWN ? ` ${t("andMore", { number: sizes.length - SIZES_SHOWN })}` : "";
  const batches = different(used.map(({ batch }) => batch)).sort((one, other) => one - other);
  const contexts = different(used.map(({ context }) => context)).sort((one, other) => one - other);
  const parts = [
    kind,
    sizes.slice(0, SIZES_SHOWN).join(", ") + rest,
    batches.some((batch) => batch > 1) ? t("batchOf", { number: batches.join(", ") }) : null,
    contexts.length ? t("contextOf", { number: contexts.join(", ") }) : null,
  ];
  return parts.filter(Boolean).join(" · ") || NOTHING;
}

const different = (values) => [...new Set(values.filter((value) => value !== null && value !== undefined))];
