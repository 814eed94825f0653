// A draft tree as SVG: depth from left to right, the accepted path lit, the target's own token behind it.

import {svg} from "/page/svg.js";

const COLUMN = 122, ROW = 26, WIDE = 102, TALL = 20;

export function visible(text) {
  return text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣") || "∅";
}

export function layout(nodes) {
  // x: depth; y: leaves one below the other in the drafter's order, a parent beside its first child.
  const children = nodes.map(() => []), depth = [], y = [];
  nodes.forEach((node, i) => {
    depth[i] = node.parent < 0 ? 0 : depth[node.parent] + 1;
    if (node.parent >= 0) children[node.parent].push(i);
  });
  let row = 0;
  const place = (i) => {
    children[i].forEach(place);
    y[i] = children[i].length ? y[children[i][0]] : row++;
  };
  place(0);
  return {depth, y, rows: row, columns: Math.max(...depth) + 1};
}

export function draw(target, round) {
  const nodes = round.nodes.map((node) => ({...node})), lit = new Set(round.path);
  const last = round.path[round.path.length - 1];
  if (round.bonus) {
    nodes.push({...round.bonus, parent: last, p: null, bonus: true});
    lit.add(nodes.length - 1);
  }
  const {depth, y, rows, columns} = layout(nodes);
  const at = (i) => [depth[i] * COLUMN + 2, y[i] * ROW + 2];
  const lines = nodes.map((node, i) => {
    if (node.parent < 0) return "";
    const [x1, y1] = at(node.parent), [x2, y2] = at(i), a = x1 + WIDE, h = TALL / 2, bend = (x2 - a) / 2;
    const path = `M${a} ${y1 + h}C${a + bend} ${y1 + h} ${x2 - bend} ${y2 + h} ${x2} ${y2 + h}`;
    return svg("path", {d: path, class: lit.has(i) ? "lit" : ""});
  });
  const boxes = nodes.map((node, i) => {
    const [x, top] = at(i), text = visible(node.text), kind = (lit.has(i) ? "lit" : "") + (node.bonus ? " bonus" : "");
    const percent = node.p === null ? "target" : node.parent < 0 ? "" : `${(100 * node.p).toFixed(node.p < 0.1 ? 1 : 0)}%`;
    return svg("g", {class: `node ${kind}`},
      svg("title", {}, `${JSON.stringify(node.text)}, token ${node.token}${percent && `, ${percent}`}`),
      svg("rect", {x, y: top, width: WIDE, height: TALL, rx: 5}),
      svg("text", {x: x + 6, y: top + 14}, text.length > 9 ? `${text.slice(0, 8)}…` : text),
      svg("text", {x: x + WIDE - 5, y: top + 14, class: "dim", "text-anchor": "end"}, percent));
  });
  target.setAttribute("width", columns * COLUMN);
  target.setAttribute("height", rows * ROW + 4);
  target.replaceChildren(...lines, ...boxes);
}
