// Sliders over pictures that were drawn in advance: one control is varied, the others stand at their start.
function explorer(box) {
  const data = JSON.parse(box.dataset.explorer);
  const root = document.documentElement.dataset.content_root || "./";
  const figure = document.createElement("figure");
  const image = document.createElement("img");
  const caption = document.createElement("figcaption");
  const sliders = {};
  function show(key, at) {
    for (const [name, s] of Object.entries(sliders)) {
      s.input.value = name === key ? at : data.start[name];
      s.output.textContent = data.frames[name][s.input.value].value;
      s.input.setAttribute("aria-valuetext", s.output.textContent);
    }
    const frame = data.frames[key][at];
    image.src = root + data.folder + frame.file;
    image.alt = frame.alt;
    caption.textContent = frame.caption;
  }
  for (const [key, frames] of Object.entries(data.frames)) {
    const row = document.createElement("div");
    const label = document.createElement("label");
    const input = document.createElement("input");
    const output = document.createElement("output");
    const play = document.createElement("button");
    row.className = "control";
    input.type = "range";
    input.min = 0;
    input.max = frames.length - 1;
    input.id = box.id + "-" + key;
    label.htmlFor = output.htmlFor = input.id;
    label.textContent = key.replaceAll("_", " ");
    play.type = "button";
    play.textContent = "▶";
    play.setAttribute("aria-label", "play " + label.textContent);
    let timer = 0;
    function stop() {
      clearInterval(timer);
      timer = 0;
      play.textContent = "▶";
    }
    play.onclick = () => {
      if (timer) return stop();
      play.textContent = "■";
      let at = Number(input.value) === frames.length - 1 ? 0 : Number(input.value);
      show(key, at);
      timer = setInterval(() => (at < frames.length - 1 ? show(key, ++at) : stop()), 900);
    };
    input.oninput = () => {
      stop();
      show(key, Number(input.value));
    };
    sliders[key] = { input, output };
    row.append(label, input, output, play);
    box.append(row);
  }
  figure.append(image, caption);
  box.append(figure);
  const first = Object.keys(data.frames)[0];
  show(first, data.start[first]);
}

// The projector: `?slides` at the end of the address shows a lesson section by section. Code stands there only where a
// cell has the tag `slide`; outputs always do, exercises and imports never. Arrow keys turn, Escape leaves.
const SILENT = ".tag_setup, .tag_exercise, .tag_hide-input, .tag_hint, .explorer, .admonition, script";

function slides(article) {
  const deck = [];
  for (const section of article.querySelectorAll("section")) {
    const heading = section.querySelector(":scope > h1, :scope > h2, :scope > h3");
    let size = Infinity;
    for (const part of section.children) {
      if (!heading || part === heading || part.tagName === "SECTION" || part.matches(SILENT)) continue;
      if (part.matches(".cell") && !part.matches(".tag_slide") && !part.querySelector(".cell_output")) continue;
      const copy = part.cloneNode(true);
      if (!part.matches(".tag_slide")) copy.querySelectorAll(".cell_input").forEach((input) => input.remove());
      const weight = part.matches(".cell") ? 500 : part.textContent.length;
      if (size + weight > 1000) {
        deck.push(document.createElement("div"));
        deck.at(-1).append(heading.cloneNode(true));
        size = 0;
      }
      deck.at(-1).append(copy);
      size += weight;
    }
  }
  return deck;
}

function project() {
  const deck = slides(document.querySelector("article"));
  const screen = document.createElement("div");
  screen.className = "projector";
  screen.tabIndex = 0;
  document.body.append(screen);
  let at = 0;
  function turn(to) {
    at = Math.min(Math.max(to, 0), deck.length - 1);
    screen.replaceChildren(deck[at]);
    screen.dataset.place = `${at + 1} / ${deck.length}`;
    screen.scrollTop = 0;
  }
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") location.search = "";
    const step = { ArrowRight: 1, PageDown: 1, " ": 1, ArrowLeft: -1, PageUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    turn(at + step);
  });
  screen.onclick = () => turn(at + 1);
  turn(0);
  screen.focus();
}

document.addEventListener("DOMContentLoaded", () => {
  if (new URLSearchParams(location.search).has("slides")) return project();
  document.querySelectorAll(".explorer").forEach((box, i) => {
    box.id = "explorer-" + i;
    explorer(box);
  });
  document.documentElement.classList.add("moving"); // a poster that its explorer also shows is hidden
});
