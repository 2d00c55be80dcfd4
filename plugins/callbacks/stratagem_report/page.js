"use strict";
const short = new Intl.NumberFormat("en", { maximumSignificantDigits: 5 });
const figure = (value) => (value !== 0 && Math.abs(value) < 1e-3 ? value.toExponential(3) : short.format(value));

function nearest(steps, step) {
  let low = 0, high = steps.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (steps[middle] < step) low = middle; else high = middle;
  }
  return Math.abs(steps[low] - step) <= Math.abs(steps[high] - step) ? low : high;
}

for (const chart of document.querySelectorAll(".chart")) {
  const plot = chart.querySelector(".plot"), tip = chart.querySelector(".tip"), cursor = chart.querySelector(".cursor");
  const curves = JSON.parse(chart.dataset.curves).filter((curve) => curve.x.length);
  const [first, last] = JSON.parse(chart.dataset.span);
  const row = (text, key) => {
    const line = tip.appendChild(document.createElement("div"));
    if (key) line.appendChild(document.createElement("i")).className = "key c" + key;
    line.append(text);
  };
  const all = JSON.parse(chart.dataset.curves).map((curve) => curve.name);
  const hide = () => plot.classList.remove("pointed");
  plot.addEventListener("pointerleave", hide);
  const point = (event) => {
    const box = plot.getBoundingClientRect();
    const step = first + (event.clientX - box.left) / box.width * (last - first);
    const found = curves.map((curve) => [curve, nearest(curve.x, step)]);
    if (!found.length) return;
    const at = found.map(([curve, index]) => curve.x[index])
      .reduce((best, x) => (Math.abs(x - step) < Math.abs(best - step) ? x : best));
    const place = (at - first) / (last - first);
    tip.replaceChildren();
    row("step " + Math.round(at).toLocaleString("en"));
    for (const [curve, index] of found) {
      const away = curve.x[index] !== at ? ` (step ${Math.round(curve.x[index]).toLocaleString("en")})` : "";
      const band = curve.low && curve.low[index] !== curve.high[index]
        ? `  ${figure(curve.low[index])} – ${figure(curve.high[index])}` : "";
      row(`${curve.name}  ${figure(curve.y[index])}${band}${away}`, all.indexOf(curve.name) + 1);
    }
    cursor.style.left = tip.style.left = `${place * 100}%`;
    tip.classList.toggle("flipped", place > 0.5);
    plot.classList.add("pointed");
  };
  plot.addEventListener("pointermove", point);
  plot.addEventListener("pointerdown", point);
}
