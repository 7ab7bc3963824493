# A formula for a tap of your own: docs/how-to/release.md says what to fill in at a release.
class Cairn < Formula
  include Language::Python::Virtualenv

  desc "Session server for local language models on MLX"
  # The source distribution of the release, and its line of SHA256SUMS.
  url "file:///path/to/cairn_server-0.1.0.tar.gz"
  sha256 "0000000000000000000000000000000000000000000000000000000000000000"
  license "MIT"

  depends_on arch: :arm64
  depends_on :macos
  depends_on "python@3.13"

  def install
    # MLX has wheels only, so the packages are those of the index, in the versions of the lock.
    pins = (buildpath/"requirements.lock").read.scan(/^\S+==[^\\\n]+/)
    (buildpath/"pins.txt").write pins.join("\n")
    system Formula["python@3.13"].opt_bin/"python3.13", "-m", "venv", libexec
    system libexec/"bin/python", "-m", "pip", "install", "-c", "pins.txt", "."
    bin.install_symlink libexec/"bin/cairn", libexec/"bin/ops"
    generate_completions_from_executable(bin/"cairn", "completion", shell_parameter_format: :arg)
  end

  service do
    run [opt_bin/"cairn", "serve"]
    keep_alive successful_exit: false
    process_type :interactive
    log_path var/"log/cairn.log"
    error_log_path var/"log/cairn.log"
  end

  test do
    assert_match version.to_s, shell_output("#{bin}/cairn version")
    system bin/"cairn", "drill", "bit-flipped", "--data-dir", testpath
  end
end
