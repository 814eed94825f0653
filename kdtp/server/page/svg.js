// Small helpers: every text from the server becomes a text node, never markup.

export function svg(name, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

export function html(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

export function bars(target, values) {
  // Share of each value in all of them, as a histogram labelled 0, 1, 2 ...
  const total = values.reduce((a, b) => a + b, 0), top = Math.max(...values, 1e-9), width = 400, height = 130;
  const step = width / Math.max(values.length, 1);
  target.setAttribute("viewBox", `0 0 ${width} ${height}`);
  target.replaceChildren(...values.flatMap((value, i) => {
    const tall = 90 * value / top, x = i * step, middle = x + step / 2;
    return [
      svg("rect", {class: "bar", x: x + step * 0.1, y: 110 - tall, width: step * 0.8, height: tall, rx: 2}),
      svg("text", {class: "dim", x: middle, y: 124, "text-anchor": "middle"}, String(i)),
      svg("text", {class: "dim", x: middle, y: 106 - tall, "text-anchor": "middle"},
        total ? `${Math.round(100 * value / total)}%` : ""),
    ];
  }));
}

export function shares(target, legend, values, unit) {
  // values: name -> number. One bar cut into shares, and what they are.
  const total = Object.values(values).reduce((a, b) => a + b, 0) || 1;
  let x = 0;
  target.setAttribute("viewBox", "0 0 400 34");
  target.setAttribute("preserveAspectRatio", "none");
  target.replaceChildren(...Object.entries(values).map(([name, value]) => {
    const width = 400 * value / total;
    x += width;
    return svg("rect", {class: name, x: x - width, y: 2, width, height: 30}, svg("title", {}, name));
  }));
  legend.replaceChildren(...Object.entries(values).map(([name, value]) => html("li", {},
    svg("svg", {viewBox: "0 0 10 10"}, svg("rect", {class: name, width: 10, height: 10, rx: 2})),
    `${name} ${value.toFixed(value < 10 ? 2 : 1)} ${unit}`)));
}
