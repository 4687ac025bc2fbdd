"use strict";
// Zoom in time: the plot grows wider, letters do not. The names stay in view while the plot scrolls under them.
for (const figure of document.querySelectorAll("figure.timeline")) {
  const picture = figure.querySelector("svg.sennit");
  const plot = picture.querySelector("svg.plot");
  const names = picture.querySelector("g.names");
  const control = figure.previousElementSibling.querySelector(".zoom");
  const shown = control.querySelector("output");
  const width = picture.width.baseVal.value;
  const inside = plot.width.baseVal.value;
  let zoom = 1;
  const stay = () => names.setAttribute("transform", `translate(${figure.scrollLeft} 0)`);
  const set = (next) => {
    const left = plot.x.baseVal.value;
    const middle = (figure.scrollLeft + (figure.clientWidth - left) / 2) / (inside * zoom);
    zoom = Math.min(32, Math.max(1, next));
    plot.setAttribute("width", inside * zoom);
    picture.setAttribute("width", width + inside * (zoom - 1));
    for (const label of plot.querySelectorAll("[data-fits]")) {
      label.style.display = Number(label.dataset.fits) <= zoom ? "" : "none";
    }
    figure.scrollLeft = middle * inside * zoom - (figure.clientWidth - left) / 2;
    shown.textContent = `${zoom}×`;
    stay();
  };
  control.hidden = false;
  control.addEventListener("click", (event) => {
    const factor = Number(event.target.dataset.zoom);
    if (factor) set(zoom * factor);
  });
  figure.addEventListener("scroll", stay);
}
document.documentElement.dataset.ready = "yes";
