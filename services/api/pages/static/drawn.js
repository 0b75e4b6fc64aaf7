// Draws pictures of the kind that the embedded vision model reads: shapes, or a number, on a grid of four by four cells.
const CELL = 32, GRID = 4, MOST_SHAPES = 4;
const SHADES = {red: [215, 45, 45], green: [45, 160, 65], blue: [45, 85, 215], yellow: [235, 195, 35]};
const KINDS = ["circle", "square", "triangle"];
// Strokes of the digits in percent of a box; a semicolon lifts the pen.
const STROKES = [
  "50,0 85,18 90,50 85,82 50,100 15,82 10,50 15,18 50,0",
  "20,25 55,0 55,100",
  "12,22 30,2 70,2 88,25 75,50 10,100 90,100",
  "12,10 50,0 85,20 75,42 45,48 80,58 88,80 50,100 10,88",
  "70,100 70,0 8,68 95,68",
  "85,0 20,0 15,45 55,38 88,60 80,90 45,100 10,90",
  "80,5 40,15 12,60 25,95 65,100 88,75 70,50 30,52 14,70",
  "10,0 90,0 40,100",
  "50,47 18,28 30,3 70,3 82,28 50,47 12,72 28,98 72,98 88,72 50,47",
  "86,30 70,50 30,50 12,25 35,0 75,5 88,40 60,85 20,95",
];
const between = (low, high) => low + Math.random() * (high - low);
const pick = (choices) => choices[Math.floor(Math.random() * choices.length)];

function blank() {
  const canvas = make("canvas");
  canvas.width = canvas.height = CELL * GRID;
  const pen = canvas.getContext("2d");
  const ground = Math.round(between(215, 248));
  pen.fillStyle = `rgb(${ground} ${ground} ${ground})`;
  pen.fillRect(0, 0, canvas.width, canvas.height);
  return {canvas, pen};
}

function drawShape(pen, kind, colour, left, top) {
  const half = between(17, 28) / 2, side = 0.9 * half;
  const shade = SHADES[colour].map((part) => Math.round(part + between(-18, 18)));
  pen.save();
  pen.fillStyle = `rgb(${shade.join(" ")})`;
  pen.translate(left + between(half + 1, CELL - half - 1), top + between(half + 1, CELL - half - 1));
  if (kind !== "circle") pen.rotate(between(-0.2, 0.2));
  pen.beginPath();
  if (kind === "circle") pen.arc(0, 0, half, 0, 2 * Math.PI);
  if (kind === "square") pen.rect(-side, -side, 2 * side, 2 * side);
  if (kind === "triangle") [[-half, half], [half, half], [0, -half]].forEach(([x, y]) => pen.lineTo(x, y));
  pen.fill();
  pen.restore();
}

function drawnShapes() {
  const {canvas, pen} = blank();
  const cells = Array.from({length: GRID * GRID}, (_, cell) => cell).sort(() => Math.random() - 0.5);
  const shown = cells.slice(0, 1 + Math.floor(between(0, MOST_SHAPES))).sort((a, b) => a - b).map((cell) => {
    const kind = pick(KINDS), colour = pick(Object.keys(SHADES));
    drawShape(pen, kind, colour, CELL * (cell % GRID), CELL * Math.floor(cell / GRID));
    return `${colour} ${kind}`;
  });
  return {canvas, shows: shown.join(", ")};
}

function drawDigit(pen, digit, left, top) {
  const height = between(19, 26), width = height * between(0.5, 0.75), slant = between(-0.15, 0.15);
  const x = left + 2 + between(0, CELL - width - 4), y = top + 2 + between(0, CELL - height - 4);
  for (const stroke of STROKES[digit].split(";")) {
    pen.beginPath();
    for (const point of stroke.trim().split(" ")) {
      const [across, down] = point.split(",").map((part) => part / 100);
      pen.lineTo(x + width * (across + slant * (0.5 - down)), y + height * down);
    }
    pen.stroke();
  }
}

function drawnNumber() {
  const {canvas, pen} = blank();
  const digits = Array.from({length: 1 + Math.floor(between(0, GRID))}, () => Math.floor(between(0, 10)));
  const row = Math.floor(between(0, GRID));
  pen.strokeStyle = "rgb(40 30 60)";
  pen.lineWidth = Math.round(between(2, 5));
  pen.lineCap = pen.lineJoin = "round";
  digits.forEach((digit, index) => drawDigit(pen, digit, CELL * index, CELL * row));
  return {canvas, shows: `the number ${digits.join("")}`};
}

// In place of all other pictures.
function attachDrawn({canvas, shows}) {
  const url = canvas.toDataURL("image/png");
  pictures = [{name: `Drawn: ${shows}`, url, bytes: url.length * 3 / 4}];
  drawPictures();
  notePictures("Drawn by this page.");
}
