"use strict";
const root = document.documentElement;
const coarse = matchMedia("(pointer: coarse)").matches;  // touch gestures on a plot scroll the page
const dark = matchMedia("(prefers-color-scheme: dark)");
const buttons = [["zoom2d", "pan2d", "resetScale2d"]];  // only these, because plotly's default set includes an upload button
const options = { responsive: true, displaylogo: false, modeBarButtons: buttons, displayModeBar: coarse ? false : "hover" };
const figures = [...document.querySelectorAll("figure")].map((figure) => ({
  box: figure.querySelector(".plot"),
  plot: JSON.parse(figure.querySelector("script").textContent),
}));
const drawn = () => figures.filter(({ box }) => box.data);

// Returns a layout with the current colors of the page.
function withColors(layout) {
  const probe = document.createElement("i");
  root.append(probe);
  const [ink, soft, line, card] = ["--ink", "--soft", "--line", "--card"].map((name) => {
    probe.style.color = `var(${name})`;
    return getComputedStyle(probe).color;
  });
  probe.remove();
  const clear = "rgba(0,0,0,0)";
  const axis = (given) => ({
    ...given, gridcolor: line, linecolor: line, tickfont: { color: soft },
    title: { ...given.title, font: { color: soft, size: 12 } },
  });
  const axes = Object.keys(layout).filter((key) => /^[xy]axis\d*$/.test(key)).map((key) => [key, axis(layout[key])]);
  for (const [key, given] of axes) if (key[0] === "x") Object.assign(given, { spikecolor: soft, spikethickness: 1 });
  return {
    ...layout, ...Object.fromEntries(axes), paper_bgcolor: card, plot_bgcolor: clear,
    font: { color: ink, family: "system-ui, sans-serif", size: 12 },
    modebar: { bgcolor: clear, color: soft, activecolor: ink },
    hoverlabel: { bgcolor: card, bordercolor: line, font: { color: ink } },
  };
}

function paint() {
  for (const { box } of drawn()) Plotly.react(box, box.data, withColors(box.layout));
}
dark.addEventListener("change", paint);
document.getElementById("scheme").addEventListener("click", () => {
  const now = root.dataset.scheme ?? (dark.matches ? "dark" : "light");
  root.dataset.scheme = now === "dark" ? "light" : "dark";
  paint();
});

// Shows or hides a run in every plot. A legend entry stays visible while any visible run has it.
function showRuns({ box }) {
  const shown = new Set([...document.querySelectorAll("input[name=run]:checked")].map((input) => Number(input.value)));
  const visible = box.data.map((trace) => shown.has(trace.meta.run));
  const named = new Set();
  const showlegend = box.data.map(
    ({ legendgroup }, place) => visible[place] && !named.has(legendgroup) && !!named.add(legendgroup),
  );
  Plotly.restyle(box, { visible, showlegend });
}

function setAxis({ box }) {
  const axis = document.querySelector("input[name=axis]:checked").value;
  const places = box.data.flatMap((trace, place) => (trace.meta.along ? [place] : []));
  if (!places.length) return;
  const x = places.map((place) => box.data[place].meta.along[axis] ?? []);
  Plotly.update(box, { x }, { "xaxis.title.text": axis, "xaxis.autorange": true }, places);
}

function onChange(name, act) {
  const inputs = [...document.querySelectorAll(`input[name=${name}]`)];
  inputs.forEach((input) => input.addEventListener("change", () => drawn().forEach(act)));
  return (figure) => { if (inputs.some((input) => input.checked !== input.defaultChecked)) act(figure); };
}
const restore = [onChange("run", showRuns), onChange("axis", setAxis)];

// Draws one plot at a time, so that the page stays responsive.
(async () => {
  for (const figure of figures) {
    const { box, plot } = figure;
    await Plotly.newPlot(box, plot.data, { ...withColors(plot.layout), dragmode: coarse ? false : "zoom" }, options);
    restore.forEach((apply) => apply(figure));
    await new Promise((resume) => setTimeout(resume));
  }
  root.dataset.drawn = "all";
})();
