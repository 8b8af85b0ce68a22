/** Entries of a node's right-click menu: Speed Up on the way of its model, or what our nodes gain. */

import { compareWithPlain, isOurs } from "./compare.js";
import { t } from "./texts.js";

export function menuItems(node) {
  if (isOurs(node.comfyClass)) return [{ content: t("compareEntry"), callback: compareWithPlain }];
  const links = isAccel(node) ? [] : findEnds(node);
  const isWanted = links.length && !links.some((link) => isSpedUp(node.graph, link));
  return isWanted ? [{ content: t("speedUpEntry"), callback: () => speedUp(node.graph, links) }] : [];
}

const isAccel = ({ comfyClass }) => comfyClass?.startsWith("Accel");
const models = (slots) => (slots ?? []).filter(({ type }) => type === "MODEL");

/** The links by which a node's model comes to what makes no other model of it, such as samplers. */
function findEnds({ graph, inputs, outputs }) {
  const made = models(outputs);
  const links = made.length ? made.flatMap((slot) => slot.links ?? []) : models(inputs).map((slot) => slot.link);
  return links.flatMap((id) => {
    const link = graph.getLink(id);
    const target = link && graph.getNodeById(link.target_id);
    if (!target || !graph.getNodeById(link.origin_id)) return []; // it is not connected, or leaves the subgraph
    return models(target.outputs).length ? findEnds(target) : isAccel(target) ? [] : [link];
  });
}

/** Whether one of our nodes is before the link, behind reroutes too. */
function isSpedUp(graph, { origin_id: id }) {
  const origin = graph.getNodeById(id);
  const inputs = origin?.inputs?.filter(({ type }) => ["MODEL", "*"].includes(type)) ?? [];
  const before = inputs.map(({ link }) => graph.getLink(link));
  return isOurs(origin?.comfyClass) || before.some((link) => link && isSpedUp(graph, link));
}

/** Put Speed Up in these links; those of one output share it. */
function speedUp(graph, links) {
  const made = {};
  graph.beforeChange();
  for (const { origin_id: from, origin_slot: output, target_id: to, target_slot: input } of links) {
    const [origin, target, key] = [graph.getNodeById(from), graph.getNodeById(to), `${from} ${output}`];
    if (!made[key]) {
      const node = (made[key] = window.LiteGraph.createNode("AccelSpeedUp"));
      node.pos = [target.pos[0] - node.size[0] - 40, target.pos[1] - node.size[1] - 60];
      graph.add(node);
      origin.connect(output, node, node.findInputSlot("model"));
    }
    made[key].connect(0, target, input);
  }
  graph.afterChange();
}
