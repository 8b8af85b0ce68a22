/** Numbers as a person reads them, in the page's language. What is missing or no number is an en dash. */

import { language } from "./texts.js";

export const NOTHING = "–";

const UNITS = [
  ["gigabyte", 2 ** 30],
  ["megabyte", 2 ** 20],
  ["kilobyte", 2 ** 10],
];
const AGES = [
  ["day", 86400],
  ["hour", 3600],
  ["minute", 60],
];

/** "zh-CN" of "zh_CN", at which Intl throws; undefined, for the browser's own, of what is no language. */
const tagOf = (name) => name.replace("_", "-").match(/^[a-z]{2,3}(-[a-z]{4})?(-[a-z]{2})?(?![a-z])/i)?.[0];

let made = { language: null, formats: new Map() };

/** Formatters are slow to make and there are thousands of rows: each is made once a language. */
function format(Kind, options) {
  if (made.language !== language()) made = { language: language(), formats: new Map() };
  const key = Kind.name + JSON.stringify(options);
  if (!made.formats.has(key)) made.formats.set(key, new Kind(tagOf(made.language), options));
  return made.formats.get(key);
}

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

export function count(value) {
  return isNumber(value) ? format(Intl.NumberFormat, { maximumFractionDigits: 0 }).format(value) : NOTHING;
}

/** fraction: 0 to 1 */
export function percent(fraction) {
  return isNumber(fraction)
    ? format(Intl.NumberFormat, { style: "percent", maximumFractionDigits: 0 }).format(fraction)
    : NOTHING;
}

/** In KB, MB or GB of 1024. */
export function bytes(value) {
  if (!isNumber(value)) return NOTHING;
  const [unit, size] = UNITS.find(([, least]) => value >= least) ?? (value ? UNITS[2] : UNITS[1]);
  return quantity(value / size, unit, value / size < 10 ? 1 : 0);
}

/** Steps a second, as samplers count them: 3.2 it/s, or 4.1 s/it where a step takes longer than a second. */
export function rate(value) {
  if (!isNumber(value) || value <= 0) return NOTHING;
  const [number, unit] = value >= 1 ? [value, "it/s"] : [1 / value, "s/it"];
  return `${format(Intl.NumberFormat, { maximumFractionDigits: 1 }).format(number)} ${unit}`;
}

export function seconds(value) {
  if (!isNumber(value)) return NOTHING;
  if (value < 60) return quantity(value, "second", Math.abs(value) < 10 ? 1 : 0);
  const whole = Math.round(value);
  return `${quantity(Math.floor(whole / 60), "minute", 0)} ${quantity(whole % 60, "second", 0)}`;
}

function quantity(value, unit, digits) {
  const unitDisplay = unit === "second" ? "narrow" : "short"; // 14 s, not 14 sec
  const options = { style: "unit", unit, unitDisplay, maximumFractionDigits: digits };
  return format(Intl.NumberFormat, options).format(value).replace(/(\d)(s|秒)$/, "$1 $2");
}

/** How long ago a time is, in words. time: seconds since 1970 */
export function ago(time, now = Date.now() / 1000) {
  if (!isNumber(time)) return NOTHING;
  const age = Math.max(0, now - time);
  const [unit, size] = AGES.find(([, least]) => age >= least) ?? ["second", 1];
  const number = unit === "second" && age < 5 ? 0 : Math.floor(age / size);
  return format(Intl.RelativeTimeFormat, { numeric: "auto", style: "narrow" }).format(-number, unit);
}

/** The time itself, for a tooltip. */
export function moment(time) {
  return isNumber(time)
    ? format(Intl.DateTimeFormat, { dateStyle: "medium", timeStyle: "medium" }).format(time * 1000)
    : NOTHING;
}

/** `[64, 96]` as 64×96 */
export function size(sides) {
  return Array.isArray(sides) ? sides.join("×") : String(sides ?? NOTHING);
}
