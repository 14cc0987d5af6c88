// The webcam: one stream at a time, frames as JPEG files.

let current = null;

/** Show the camera in `video`. Whoever had it before is told by their `stopped`. */
export async function openCamera(video, stopped) {
  closeCamera();
  if (!navigator.mediaDevices) throw new Error("The camera works only on this machine itself or over https.");
  let stream;
  try {
    stream = await navigator.mediaDevices.getUserMedia({ video: { width: 640, height: 480 }, audio: false });
  } catch (error) {
    throw new Error(error.name === "NotAllowedError" ? "The browser does not allow the camera here; allow it and try again." : "There is no camera that can be used.");
  }
  current = { stream, video, stopped };
  video.srcObject = stream;
  await video.play();
}

export function closeCamera() {
  if (!current) return;
  const { stream, video, stopped } = current;
  current = null;
  stream.getTracks().forEach((track) => track.stop());
  video.srcObject = null;
  stopped();
}

export const isOpen = (video) => current?.video === video;

/** What the camera shows now. */
export function frame(video) {
  const canvas = document.createElement("canvas");
  canvas.width = video.videoWidth;
  canvas.height = video.videoHeight;
  canvas.getContext("2d").drawImage(video, 0, 0);
  return new Promise((done) => canvas.toBlob((blob) => done(blob && new File([blob], "camera.jpg", { type: "image/jpeg" })), "image/jpeg", 0.92));
}

/** Call `shoot` again and again while `button` is held, by pointer or by key; a single press shoots once. */
export function whileHeld(button, shoot, milliseconds = 250) {
  let timer = null;
  const start = () => {
    if (timer) return;
    button.classList.add("on");
    shoot();
    timer = setInterval(shoot, milliseconds);
  };
  const stop = () => { clearInterval(timer); timer = null; button.classList.remove("on"); };
  // The pointer is captured: each new picture may move the button away from under it.
  button.addEventListener("pointerdown", (event) => { if (event.button === 0) { button.setPointerCapture(event.pointerId); start(); } });
  for (const kind of ["pointerup", "pointercancel", "blur"]) button.addEventListener(kind, stop);
  button.addEventListener("contextmenu", (event) => event.preventDefault()); // a long touch
  button.addEventListener("keydown", (event) => { if (event.key === " " || event.key === "Enter") { event.preventDefault(); start(); } });
  button.addEventListener("keyup", stop);
  button.addEventListener("click", (event) => { if (event.detail === 0 && !timer) shoot(); }); // a screen reader's press
  return stop;
}
