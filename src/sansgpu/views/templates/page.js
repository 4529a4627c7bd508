const figures = [...document.querySelectorAll("figure")].map((figure) => ({
  box: figure.querySelector(".plot"),
  plot: JSON.parse(figure.querySelector("script").textContent),
}));
const drawn = () => figures.filter(({ box }) => box.data);

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
