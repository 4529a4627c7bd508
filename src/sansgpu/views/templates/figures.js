"use strict";
const root = document.documentElement;
const coarse = matchMedia("(pointer: coarse)").matches;  // touch gestures on a plot scroll the page
const dark = matchMedia("(prefers-color-scheme: dark)");
const buttons = [["zoom2d", "pan2d", "resetScale2d"]];  // only these, because plotly's default set includes an upload button
const options = { responsive: true, displaylogo: false, modeBarButtons: buttons, displayModeBar: coarse ? false : "hover" };

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
  for (const box of document.querySelectorAll(".plot")) {
    if (box.data) Plotly.react(box, box.data, withColors(box.layout));
  }
}
dark.addEventListener("change", paint);
document.getElementById("scheme").addEventListener("click", () => {
  const now = root.dataset.scheme ?? (dark.matches ? "dark" : "light");
  root.dataset.scheme = now === "dark" ? "light" : "dark";
  paint();
});
