// Uploads dropped files one by one and reloads the page.
const drop = document.getElementById("drop");
async function upload(files) {
  const said = document.getElementById("uploading");
  for (const file of files) {
    said.textContent = `copying ${file.name}`;
    const answer = await new Promise((resolve) => {
      const request = new XMLHttpRequest();
      request.open("PUT", drop.dataset.upload + encodeURIComponent(file.name));
      request.upload.onprogress = ({ loaded, total }) => {
        said.textContent = `copying ${file.name}: ${Math.round((100 * loaded) / Math.max(1, total))} %`;
      };
      request.onloadend = () => resolve(request);
      request.send(file);
    });
    if (answer.status !== 204) {
      const page = new DOMParser().parseFromString(answer.responseText, "text/html");
      said.textContent = page.querySelector(".problem")?.textContent ?? "the file could not be copied; try again.";
      return;
    }
  }
  location.reload();
}
if (drop) {
  document.getElementById("files").addEventListener("change", ({ target }) => upload(target.files));
  for (const name of ["dragover", "dragleave", "drop"]) {
    drop.addEventListener(name, (event) => {
      event.preventDefault();
      drop.classList.toggle("over", name === "dragover");
      if (name === "drop") upload(event.dataTransfer.files);
    });
  }
}

// Says that the studio has ended or was started anew, so that this page cannot change any more.
for (const name of ["htmx:sendError", "htmx:responseError"]) {
  document.addEventListener(name, () => {
    if (document.getElementById("ended")) return;
    const said = document.createElement("p");
    Object.assign(said, { id: "ended", className: "problem", role: "alert" });
    said.textContent = "The studio does not answer. A run goes on without it: start the studio again, and open the address that it prints.";
    document.querySelector("main").prepend(said);
  });
}

// A value chooses its radio button; another model makes the estimate of the one before obsolete.
document.addEventListener("input", ({ target }) => {
  target.closest("label.choice")?.querySelector("input[type=radio]")?.click();
  if (target.name === "model" || target.name === "other") document.getElementById("fit")?.replaceChildren();
});

// Buttons that copy the text before them.
document.addEventListener("click", async ({ target }) => {
  if (!target.classList.contains("copy")) return;
  const box = target.parentElement.querySelector("pre");
  getSelection().selectAllChildren(box);
  await navigator.clipboard?.writeText(box.textContent).then(() => { target.textContent = "Copied"; }, () => {});
});

// Plots: drawn again when the run has new events.
const plots = document.getElementById("plots");
const DRAW_SECONDS = 10;  // at most so often during a run, because drawing takes time from it
let drawnVersion = null, drawnAt = 0;
async function draw() {
  const state = document.getElementById("state");
  const version = state?.dataset.version ?? "";
  const isSoon = state?.hasAttribute("hx-get") && Date.now() - drawnAt < 1000 * DRAW_SECONDS;
  if (!plots || version === drawnVersion || isSoon) return;
  [drawnVersion, drawnAt] = [version, Date.now()];
  const found = await (await fetch(plots.dataset.plots)).json();
  for (const { name, title, note, wide, data, layout } of found) {
    let figure = [...plots.children].find((one) => one.dataset.name === name);
    if (!figure) {
      figure = plots.appendChild(document.createElement("figure"));
      figure.dataset.name = name;
      figure.classList.toggle("wide", wide);
      const caption = figure.appendChild(document.createElement("figcaption"));
      caption.appendChild(document.createElement("b")).textContent = title;
      if (note) caption.appendChild(document.createElement("span")).textContent = note;
      figure.appendChild(document.createElement("div")).className = "plot";
    }
    const box = figure.querySelector(".plot");
    await Plotly.react(box, data, { ...withColors(layout), dragmode: coarse ? false : "zoom" }, options);
  }
  for (const box of plots.querySelectorAll(".plot")) Plotly.Plots.resize(box);  // a figure beside it made it narrower
  root.dataset.drawn = version || "all";
}
if (plots) {
  draw();
  document.addEventListener("htmx:afterSettle", draw);
}

// Parts that are replaced keep what is opened in them.
document.addEventListener("htmx:beforeSwap", ({ detail }) => {
  detail.opened = [...document.querySelectorAll("details[open][id]")].map(({ id }) => id);
  const kept = detail.opened;
  document.addEventListener("htmx:afterSwap", () => {
    for (const id of kept) document.getElementById(id)?.setAttribute("open", "");
  }, { once: true });
});

// Enter asks; Shift+Enter begins a new line.
document.querySelector("#ask textarea")?.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  event.target.form.requestSubmit();
});

// Asks the trained model, and the one before the training, at the same time.
document.getElementById("ask")?.addEventListener("submit", async (event) => {
  event.preventDefault();
  const form = event.target;
  const button = form.querySelector("button");
  button.disabled = true;
  const both = form.elements.both?.checked ?? true;
  const places = [...document.querySelectorAll(".answers")].filter(({ dataset }) => both || dataset.side === "trained");
  await Promise.all(places.map(async (place) => {
    const waiting = document.createElement("p");
    waiting.append(document.createElement("progress"), " loading and writing");
    place.prepend(waiting);
    const started = Date.now();
    const counting = setInterval(() => {
      waiting.lastChild.textContent = ` loading and writing, ${Math.round((Date.now() - started) / 1000)} s`;
    }, 1000);
    const body = new URLSearchParams({ ...Object.fromEntries(new FormData(form)), run: form.dataset.run, side: place.dataset.side });
    const answer = await fetch("/try/answer", { method: "POST", body }).catch(() => null);
    const page = new DOMParser().parseFromString(answer ? await answer.text() : "", "text/html");
    const shown = page.querySelector(".answer") ?? page.querySelector(".problem");
    clearInterval(counting);
    if (shown) waiting.replaceWith(shown);
    else waiting.textContent = "the studio does not answer; reload the page.";
  }));
  button.disabled = false;
});
