/** The pack's part of the page: a sidebar tab, settings, commands, and a toast when something runs uncompiled. */

import { app } from "../../scripts/app.js";
import { COMMANDS, sortTemplates, TAB } from "./commands.js";
import { feed } from "./feed.js";
import { menuItems } from "./node_menu.js";
import { startNodeTexts } from "./node_text.js";
import { destroy, render } from "./panel.js";
import { SETTINGS, startSettings } from "./settings.js";
import { choiceText, language } from "./texts.js";
import { tellCompiling, tellFallback } from "./toasts.js";

app.registerExtension({
  name: "accel.panel",
  settings: SETTINGS,
  commands: COMMANDS,
  getNodeMenuItems: menuItems,
  async setup() {
    // "Accel" is a key of locales/LANGUAGE/main.json too, so that the page can translate the tab's label.
    const tab = { id: TAB, title: "Accel", tooltip: "Accel", icon: "pi pi-bolt", type: "custom", render, destroy };
    app.extensionManager?.registerSidebarTab?.(tab);
    feed.start();
    feed.onMessage((message) => message.event === "fallback" && tellFallback(message));
    feed.onMessage((message) => message.event === "node_compiling" && tellCompiling(message));
    feed.onMessage(showBadge);
    startNodeTexts();
    sortTemplates();
    startSettings(); // not waited for: the page starts no slower
  },
  nodeCreated({ comfyClass, widgets }) {
    if (!comfyClass?.startsWith("Accel") || language().startsWith("en")) return;
    for (const { type, options } of widgets ?? []) if (type === "combo") options.getOptionLabel = choiceText;
  },
});

/** How many kinds are still to compile, on the tab's icon. */
function showBadge() {
  const tab = app.extensionManager?.getSidebarTabs?.().find(({ id }) => id === TAB);
  if (!tab) return;
  const { compiling } = feed;
  const text = compiling ? (compiling.of > 0 ? String(compiling.of - compiling.number + 1) : "…") : null;
  if ((tab.iconBadge ?? null) !== text) tab.iconBadge = text;
}
