/** What the command palette and the panel's buttons do. */

import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";
import { compareWithPlain } from "./compare.js";
import { feed } from "./feed.js";
import { bytes, count } from "./format.js";
import * as server from "./server.js";
import { loadTexts, t } from "./texts.js";
import { toast, toastFailure } from "./toasts.js";

export const TAB = "accel";
const REPORT = "accel-report.txt";

/** Labels are English here; the page takes others from locales/LANGUAGE/commands.json. */
export const COMMANDS = [
  { id: "Accel.OpenPanel", label: "Accel: open panel", icon: "pi pi-bolt", function: openPanel },
  { id: "Accel.ClearCache", label: "Accel: clear graph cache", icon: "pi pi-trash", function: clearCache },
  { id: "Accel.Compare", label: "Accel: compare with plain", icon: "pi pi-images", function: compareWithPlain },
  { id: "Accel.ExportReport", label: "Accel: export report", icon: "pi pi-download", function: exportReport },
];

/** Show the tab, and give it the focus, unless a control in it has that already; resolves when it is done. */
async function openPanel() {
  if (!isOpen()) await togglePanel();
  await new Promise(requestAnimationFrame); // the page draws the tab
  const panel = document.querySelector(".accel-panel");
  if (!panel?.contains(document.activeElement)) panel?.focus();
}

const isOpen = () => app.extensionManager.sidebarTab?.activeSidebarTab?.id === TAB;
const togglePanel = () => app.extensionManager.command.execute(`Workspace.ToggleSidebarTab.${TAB}`);

const PACK = new URL(import.meta.url).pathname.split("/").at(-2);

/** Have the page list our templates by name: the server does in whatever order the disk has them. */
export function sortTemplates() {
  const own = api.getWorkflowTemplates;
  api.getWorkflowTemplates = async function (...args) {
    const found = await own.apply(this, args);
    found?.[PACK]?.sort?.();
    return found;
  };
}

/** Load the template to start with, as the template browser does; the panel, which would cover it, goes. */
export async function openStarter() {
  const offered = (await server.fetchTemplates())[PACK] ?? [];
  const name = offered.find((title) => title.toLowerCase().includes("start here")) ?? offered[0];
  const graph = name && (await server.fetchTemplate(PACK, name));
  if (!graph) return toast("error", t("failedAction"), t("unreachable"));
  if (isOpen()) await togglePanel();
  await app.loadGraphData(graph, true, true, name);
}

/** Drop all compiled graphs, once the person has agreed to it. */
export async function clearCache() {
  await loadTexts();
  if (!(await isConfirmed(t("clear"), t("clearQuestion")))) return;
  const answer = await server.clear();
  if (server.isFine(answer)) {
    const { dropped, bytes: freed } = answer.data ?? {};
    toast("success", t("cleared"), t("clearedNumbers", { number: count(dropped), bytes: bytes(freed) }));
  } else {
    toastFailure("failedAction", answer);
  }
  feed.refresh();
}

/** Save the server's report as a text file. */
export async function exportReport() {
  await loadTexts();
  const answer = await server.fetchReport();
  if (!server.isFine(answer)) return toastFailure("failedAction", answer);
  const text = typeof answer.data === "string" ? answer.data : JSON.stringify(answer.data, null, 2);
  const address = URL.createObjectURL(new Blob([text], { type: "text/plain" }));
  const link = Object.assign(document.createElement("a"), { href: address, download: REPORT });
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

/** Whether the person agrees. type: of the page's dialog, which names its buttons */
export const isConfirmed = (title, message, type = "delete") =>
  app.extensionManager.dialog.confirm({ title, message, type });
