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
      play.textContent = "⏸";
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

document.addEventListener("DOMContentLoaded", () => {
  document.querySelectorAll(".explorer").forEach((box, i) => {
    box.id = "explorer-" + i;
    explorer(box);
  });
});
