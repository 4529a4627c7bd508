"use strict";
const root = document.documentElement;
const coarse = matchMedia("(pointer: coarse)").matches;  // a finger that moves over a plot scrolls the page
const figures = [...document.querySelectorAll("figure")].map((figure) => ({
  box: figure.querySelector(".plot"),
  plot: JSON.parse(figure.querySelector("script").textContent),
}));

// The page's own colours, as they are now.
function scheme() {
  const probe = document.createElement("i");
  root.append(probe);
  const colour = (name) => {
    probe.style.color = `var(${name})`;
    return getComputedStyle(probe).color;
  };
  const [ink, soft, line, card] = ["--ink", "--soft", "--line", "--card"].map(colour);
  probe.remove();
  const axes = {};
  for (const axis of ["xaxis", "yaxis"]) {
    axes[`${axis}.gridcolor`] = axes[`${axis}.linecolor`] = line;
    axes[`${axis}.tickfont.color`] = axes[`${axis}.title.font.color`] = soft;
  }
  return {
    ...axes, "font.color": ink, "font.family": "system-ui, sans-serif", "font.size": 12, "legend.font.color": ink,
    "paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)", "modebar.bgcolor": "rgba(0,0,0,0)",
    "modebar.color": soft, "modebar.activecolor": ink,
    "hoverlabel.bgcolor": card, "hoverlabel.bordercolor": line, "hoverlabel.font.color": ink,
  };
}

function paint() {
  const colours = scheme();
  figures.forEach(({ box }) => Plotly.relayout(box, colours));
}

const buttons = ["lasso2d", "select2d", "autoScale2d", "zoomIn2d", "zoomOut2d", "toImage"];
const options = { responsive: true, displaylogo: false, modeBarButtonsToRemove: buttons, displayModeBar: coarse ? false : "hover" };
figures.forEach(({ box, plot }) => Plotly.newPlot(box, plot.data, { ...plot.layout, dragmode: coarse ? false : "zoom" }, options));
if (figures.length) paint();

const dark = matchMedia("(prefers-color-scheme: dark)");
dark.addEventListener("change", () => { if (figures.length) paint(); });
document.getElementById("scheme").addEventListener("click", () => {
  const now = root.dataset.scheme ?? (dark.matches ? "dark" : "light");
  root.dataset.scheme = now === "dark" ? "light" : "dark";
  if (figures.length) paint();
});

// A run's checkbox shows and hides it in every plot; a role's name stays in the legend while any run has it.
function showRuns() {
  const shown = new Set([...document.querySelectorAll("input[name=run]:checked")].map((input) => Number(input.value)));
  for (const { box } of figures) {
    const visible = box.data.map((trace) => shown.has(trace.meta.run));
    const named = new Set();
    const legend = box.data.map((trace, place) => visible[place] && !named.has(trace.legendgroup) && !!named.add(trace.legendgroup));
    Plotly.restyle(box, { visible, showlegend: legend });
  }
}
document.querySelectorAll("input[name=run]").forEach((input) => input.addEventListener("change", showRuns));

document.querySelectorAll("input[name=axis]").forEach((input) => input.addEventListener("change", () => {
  for (const { box } of figures) {
    const places = box.data.flatMap((trace, place) => (trace.meta.along ? [place] : []));
    if (!places.length) continue;
    const x = places.map((place) => box.data[place].meta.along[input.value] ?? []);
    Plotly.update(box, { x }, { "xaxis.title.text": input.value, "xaxis.autorange": true }, places);
  }
}));
