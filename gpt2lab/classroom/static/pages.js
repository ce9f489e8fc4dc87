// Sliders over pictures that were drawn in advance: one control is varied, the others stand at their start.
function explorer(box) {
  const data = JSON.parse(box.dataset.explorer);
  const root = document.documentElement.dataset.content_root || "./";
  const values = Object.values(data.frames).flat().map((frame) => frame.value.length);
  box.style.setProperty("--longest", Math.max(...values) + "ch");
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
  const stops = []; // one control plays at a time
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
    stops.push(stop);
    play.onclick = () => {
      const mine = timer;
      stops.forEach((one) => one());
      if (mine) return;
      play.textContent = "■";
      let at = Number(input.value) === frames.length - 1 ? 0 : Number(input.value);
      show(key, at);
      timer = setInterval(() => (at < frames.length - 1 ? show(key, ++at) : stop()), 900);
    };
    input.oninput = () => {
      stops.forEach((one) => one());
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
// cell has the tag `slide`; outputs and sliders always do, exercises, hints and imports never. Arrow keys and clicks
// turn, Escape leaves; a slider or a player that has the focus keeps the arrow keys, Page Up and Page Down always turn.
const SILENT = "h1, h2, h3, section, script, .tag_setup, .tag_exercise, .tag_hide-input, .tag_poster, .admonition";
const OWN = "input, select, button, summary, a, [role=group]";

// What a slide is made of: paragraphs, code, outputs, figures with their captions.
function pieces(section) {
  const found = [];
  for (const part of section.children) {
    if (part.matches(SILENT) || part.querySelector(":scope > summary")?.textContent.trim() === "Hint") continue;
    if (!part.matches(".cell")) {
      found.push(part);
      continue;
    }
    const [input, output] = ["input", "output"].map((kind) => part.querySelector(`:scope > .cell_${kind}`));
    if (input && part.matches(".tag_slide")) found.push(input);
    for (const one of [...(output?.children || [])]) {
      const last = found.at(-1);
      if (one.matches("p") && last?.querySelector("img")) last.append(one);
      else {
        const alone = output.cloneNode(false);
        alone.append(one);
        found.push(alone);
      }
    }
  }
  return found;
}

function fits(screen, zoom = screen.firstChild.style.zoom) {
  screen.firstChild.style.zoom = zoom;
  const wide = [...screen.querySelectorAll("table")].some((t) => t.scrollWidth > t.clientWidth + 1);
  return !wide && screen.scrollHeight <= screen.clientHeight;
}

// Letters as large as fit, half as large again at most; returns which part of the height is then used.
function grow(screen, most = LARGE) {
  for (let zoom = most; !fits(screen, zoom) && zoom > 0.5; ) zoom -= 0.05;
  const { paddingTop, paddingBottom } = getComputedStyle(screen);
  const room = screen.clientHeight - parseFloat(paddingTop) - parseFloat(paddingBottom);
  return screen.firstChild.getBoundingClientRect().height / room;
}

function show(screen, parts) {
  const slide = document.createElement("div");
  slide.append(...parts);
  screen.replaceChildren(slide);
}

const SMALL = 0.8, LARGE = 1.5, LARGEST = 2.5, HALF = 0.55;

// The slides as lists of elements. As much goes on one as fits in letters a fifth smaller; a text that announces what
// follows goes with it.
function slides(article, screen) {
  const deck = [];
  for (const section of article.querySelectorAll("section")) {
    const heading = section.querySelector(":scope > h1, :scope > h2, :scope > h3");
    let slide = null;
    for (const piece of heading ? pieces(section) : []) {
      if (slide) {
        show(screen, [...slide, piece]);
        if (fits(screen, SMALL)) {
          slide.push(piece);
          continue;
        }
      }
      const announced = slide?.length > 2 && /(:|\.py)$/.test(slide.at(-1).textContent.trim());
      const first = announced ? [slide.pop()] : [];
      for (const part of parted(piece, [heading, ...first], screen) || [piece]) {
        slide = [heading.cloneNode(true), ...first.splice(0), part];
        deck.push(slide);
      }
      show(screen, slide);
      shorten(slide.at(-1), screen);
    }
  }
  return deck;
}

// A table or a program that is too long for small letters goes on on more slides, four at most; null where these do not do.
function parted(piece, above, screen, most = 4) {
  show(screen, [...above.map((part) => part.cloneNode(true)), piece]);
  if (fits(screen, SMALL)) return [piece];
  const found = most > 1 ? halves(piece).map((half) => parted(half, above.slice(0, 1), screen, most / 2)) : [];
  return found.length && !found.includes(null) ? found.flat() : null;
}

// Two copies: of a table, each with one half of the rows; of a program, cut at the blank line that is nearest to its middle.
function halves(piece) {
  const two = [piece.cloneNode(true), piece.cloneNode(true)];
  const [rows, code] = ["tbody tr", "pre"].map((name) => two.map((half) => [...half.querySelectorAll(name)]));
  const middle = Math.ceil(rows[0].length / 2);
  if (middle > 1) two.forEach((_, n) => rows[n].forEach((row, at) => at < middle === (n === 1) && row.remove()));
  else if (code[0].length === 1) {
    const text = code[0][0].innerHTML;
    const blank = [...text.matchAll(/\n\n+/g)].filter(({ index }) => {
      const before = text.slice(0, index);
      return before.split("<span").length === before.split("</span>").length;
    });
    const far = ({ index }) => Math.abs(index - text.length / 2);
    const cut = blank.sort((a, b) => far(a) - far(b))[0];
    if (!cut) return [];
    code[0][0].innerHTML = text.slice(0, cut.index);
    code[1][0].innerHTML = text.slice(cut.index + cut[0].length);
  } else return [];
  return two;
}

// A table that no letters make fit ends where its slide does, and says what is left out.
function shorten(piece, screen) {
  const rows = [...(piece.querySelector("tbody")?.rows || [])];
  const all = rows.length;
  if (!all || fits(screen, 0.5)) return;
  const more = document.createElement("p");
  piece.append(more);
  while (rows.length > 1 && !fits(screen, 0.6)) {
    rows.pop().remove();
    more.textContent = `${all - rows.length} more rows stand on the page.`;
  }
}

// No slide is half empty: one that would be takes the end of the slide before it in its section, or else goes together
// with the next slide or with the one before it.
function even(deck, screen) {
  const used = (parts) => (show(screen, parts), grow(screen));
  const title = (part) => part.matches("h1, h2, h3") && part.textContent;
  const join = (a, b) => [...a, ...(title(a.findLast(title)) === title(b[0]) ? b.slice(1) : b)];
  for (let at = 0; at < deck.length; at += 1) {
    const slide = deck[at], before = deck[at - 1];
    if (used(slide) >= HALF) continue;
    for (let cut = before?.length - 1; cut > 1 && title(before[0]) === title(slide[0]); cut -= 1) {
      const parts = [before.slice(0, cut), [slide[0], ...before.slice(cut), ...slide.slice(1)]];
      if (used(parts[0]) < HALF) break;
      if (used(parts[1]) < HALF) continue;
      if (fits(screen, SMALL)) deck.splice(at - 1, 2, ...parts);
      break;
    }
    for (const first of deck[at] === slide ? [at, at - 1] : []) {
      const both = deck[first] && deck[first + 1] && join(deck[first], deck[first + 1]);
      if (!both || (show(screen, both), !fits(screen, SMALL))) continue;
      deck.splice(first, 2, both);
      at = first - 1;
      break;
    }
  }
  return deck;
}

async function project() {
  const screen = document.createElement("div");
  screen.className = "projector";
  screen.tabIndex = 0;
  await Promise.all([...document.images].map((image) => image.decode().catch(() => {}))); // until sizes are known
  document.body.append(screen);
  const deck = even(slides(document.querySelector("article"), screen), screen);
  let at = 0;
  function turn(to) {
    at = Math.min(Math.max(to, 0), deck.length - 1);
    show(screen, deck[at]);
    for (let most = LARGE; grow(screen, most) < HALF && most < LARGEST; ) most += 0.05; // what is short is large
    screen.dataset.place = `${at + 1} / ${deck.length}`;
    screen.scrollTop = 0;
    screen.focus();
  }
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") location.search = "";
    const always = { PageDown: 1, PageUp: -1 }[event.key];
    const step = always || { ArrowRight: 1, " ": 1, ArrowLeft: -1 }[event.key];
    if (!step || (!always && event.target.closest(OWN))) return;
    event.preventDefault();
    turn(at + step);
  });
  screen.onclick = (event) => event.target.closest(OWN + ", .explorer") || turn(at + 1);
  turn(0);
}

// A click on a figure shows it as wide as the window, on a phone as wide as 960 pixels; another click closes it.
document.addEventListener("click", (event) => {
  const image = event.target.closest("article img");
  if (!image || image.closest(".projector")) return;
  const dialog = document.createElement("dialog");
  dialog.className = "enlarged";
  dialog.append(Object.assign(document.createElement("img"), { src: image.src, alt: image.alt }));
  dialog.onclick = () => dialog.remove();
  dialog.onkeydown = (key) => key.key === "Escape" && dialog.remove(); // which Sphinx keeps for its own
  document.body.append(dialog);
  dialog.showModal();
});

// What the theme needs of a script of 80 kB that is left out: the menu of colours, and a tip at the sidebar's button.
window.bootstrap = {
  Tooltip: class {
    constructor(element, { title }) {
      element.title = title;
    }
    show() {}
    hide() {}
  },
};
document.addEventListener("click", (event) => {
  for (const button of document.querySelectorAll(".dropdown-toggle")) {
    const menu = button.nextElementSibling;
    const open = button.contains(event.target) && !menu.classList.contains("show");
    menu.classList.toggle("show", open);
    button.setAttribute("aria-expanded", open);
  }
});

document.addEventListener("DOMContentLoaded", () => {
  // Sphinx links a figure to its file: without this script that enlarges it.
  for (const link of document.querySelectorAll("a.image-reference")) link.replaceWith(...link.childNodes);
  document.querySelectorAll(".explorer").forEach((box, i) => {
    box.id = "explorer-" + i;
    explorer(box);
  });
  document.documentElement.classList.add("moving"); // a poster that its explorer also shows is hidden
  if (new URLSearchParams(location.search).has("slides")) project();
});
