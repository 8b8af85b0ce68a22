/**
 * What the panel shows: the server's state, fetched when somebody looks and something happened, and what WebSocket
 * messages say between. Nothing is asked while nobody looks, the page is hidden, or nothing happens.
 */

import { api } from "../../scripts/api.js";
import { fetchState, isFine, problemOf } from "./server.js";

const ROWS = 200; // of the table, the last used
const ENDS = ["run_end", "code_ready", "reconnecting", "reconnected"]; // of compiling
const PAUSE = 500; // milliseconds; a run tells of many graphs one after the other

class Feed {
  /** The last answer; null before the first. */
  state = null;
  /** Why there is none: "missing" (no such route), "unreachable"; null where there is one, or none was asked for. */
  problem = null;
  /** What is being compiled, `{name, number, of, seconds}`, with `at` (performance.now()) when that was said. */
  compiling = null;

  #watchers = new Set();
  #listeners = new Set();
  #timer = null;
  #isAsking = false;
  #isStale = false;

  /** Listen to the server; once, when the page is set up. */
  start() {
    api.addEventListener("accel", ({ detail }) => this.#hear(detail ?? {}));
    for (const event of ["reconnecting", "reconnected"]) api.addEventListener(event, () => this.#hear({ event }));
    document.addEventListener("visibilitychange", () => this.#isStale && this.refresh());
  }

  /** Call `watcher()` after each change; the first one fetches. The function returned ends that. */
  watch(watcher) {
    this.#watchers.add(watcher);
    this.refresh();
    return () => this.#watchers.delete(watcher);
  }

  /** Call `listener(message)` for each WebSocket message, whether or not somebody watches. */
  onMessage(listener) {
    this.#listeners.add(listener);
  }

  /** Fetch now if somebody looks, else when somebody does. */
  async refresh() {
    clearTimeout(this.#timer);
    this.#timer = null;
    this.#isStale = true;
    if (!this.#watchers.size || document.hidden || this.#isAsking) return;
    this.#isAsking = true;
    while (this.#isStale) {
      this.#isStale = false;
      this.#take(await fetchState(ROWS));
    }
    this.#isAsking = false;
    this.#tell();
  }

  #take(answer) {
    const isState = isFine(answer) && answer.data !== null && typeof answer.data === "object";
    this.problem = isState ? null : problemOf(answer);
    if (!isState) return;
    this.state = answer.data;
    this.#setCompiling(answer.data.compiling);
  }

  #setCompiling(said) {
    this.compiling = said ? { ...said, at: performance.now() } : null;
  }

  #hear(message) {
    if (message.event === "compiling") this.#setCompiling(message);
    else if (ENDS.includes(message.event)) this.compiling = null;
    else if (message.event === "compiled" && !(this.compiling?.number < this.compiling?.of)) this.compiling = null;
    for (const listener of this.#listeners) listener(message);
    this.#tell();
    if (message.event !== "compiling") this.#refreshSoon();
  }

  #refreshSoon() {
    this.#timer ??= setTimeout(() => this.refresh(), PAUSE);
  }

  #tell() {
    for (const watcher of this.#watchers) watcher();
  }
}

export const feed = new Feed();
