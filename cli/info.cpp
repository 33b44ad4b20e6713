// wherry info: what this build and this machine can do, and why not the rest.
#include <fmt/format.h>

#include <memory>
#include <string>
#include <vector>

#include "command.hpp"
#include "experts/expert_hidden.hpp"
#include "kernels/stages.hpp"
#include "machine.hpp"
#include "report/output.hpp"
#include "report/table.hpp"
#include "route/models.hpp"
#include "support/build_info.hpp"
#include "support/devices.hpp"

namespace wherry::cli {
namespace {

struct FabricInfo {
  std::string name;
  bool available;
  std::string reason;
};

// How windows in GPU memory are shared, or why there are none.
std::string windows_text(const Devices& gpus) {
  if (gpus.found.empty()) return gpus.problem;
  std::string no_descriptors;
  std::string no_handles;
  int ordinal = 0;
  for (const DeviceDescription& gpu : gpus.found) {
    if (!gpu.no_virtual_memory.empty()) no_descriptors = gpu.no_virtual_memory;
    const std::string problem = no_fabric_handles(ordinal++);
    if (!problem.empty()) no_handles = problem;
  }
  std::string between = "virtual memory";
  if (!no_descriptors.empty()) {
    between = no_handles.empty() ? fmt::format("fabric handles, since {}", no_descriptors)
                                 : fmt::format("CUDA IPC, since {}", no_descriptors);
  }
  if (!no_handles.empty()) between += fmt::format("; {}", no_handles);
  return "windows in GPU memory: pointers in one process, between processes " + between;
}

std::vector<FabricInfo> fabrics(const Devices& gpus) {
  return {{"process", true, "ranks as threads of one process"},
          {"shm", true, "ranks as processes of this machine, through shared memory"},
          {"cuda_peer", !gpus.found.empty(), windows_text(gpus)},
          {"ucx", WHERRY_HAS_UCX != 0, std::string(build_info::reason_of("WHERRY_UCX"))}};
}

// What an exchange on this GPU uses.
std::string kernels_on(const DeviceDescription& gpu) {
  if (!gpu.bulk_copies) return "cuda_copy";
  const std::string_view pinned = kernels::from_environment_on_cuda();
  return pinned.empty() ? "cuda" : std::string(pinned);
}

Json as_json() {
  Json object = json_for("info");
  object["build_type"] = build_info::kBuildType;
  object["compiler"] = build_info::kCompiler;
  object["flags"] = build_info::kFlags;
  for (const auto& option : build_info::kOptions) {
    object["options"].push_back({{"name", option.name},
                                 {"enabled", option.enabled},
                                 {"asked", option.asked},
                                 {"gives", option.gives},
                                 {"reason", option.reason}});
  }
  const Cpu processor = cpu();
  object["cpu"] = processor.model;
  object["cores"] = num_cores();
  object["memory_bytes"] = total_memory();
  object["available_memory_bytes"] = available_memory();
  for (const CpuFeature& feature : processor.features) {
    object["cpu_features"][feature.name] = feature.present;
  }
  for (const auto& set : kernels::available()) object["kernels"].push_back(set.name);
  object["kernels_used"] = kernels::find({}).name;
  const Devices gpus = find_devices();
  object["gpus"] = Json::array();
  for (const DeviceDescription& gpu : gpus.found) {
    object["gpus"].push_back(
        {{"name", gpu.name},
         {"multiprocessors", gpu.multiprocessors},
         {"compute", fmt::format("{}.{}", gpu.compute_major, gpu.compute_minor)},
         {"memory_bytes", gpu.memory_bytes},
         {"kernels", kernels_on(gpu)}});
  }
  for (const FabricInfo& fabric : fabrics(gpus)) {
    object["fabrics"].push_back(
        {{"name", fabric.name}, {"available", fabric.available}, {"reason", fabric.reason}});
  }
  for (const Wire wire : all_wires()) object["wires"].push_back(name(wire));
  for (const Model& model : models()) {
    object["models"].push_back({{"name", model.name},
                                {"hidden", model.hidden},
                                {"expert_hidden", model.expert_hidden},
                                {"experts", model.experts},
                                {"topk", model.topk},
                                {"shared", model.shared}});
  }
  return object;
}

std::string yes_no(bool yes) { return yes ? "yes" : "no"; }

std::string kernels_text() {
  const std::string_view used = kernels::find({}).name;
  std::string text;
  for (const auto& set : kernels::available()) {
    text += fmt::format("{}{}{}", text.empty() ? "" : ", ", set.name,
                        set.name == used ? " (used)" : "");
  }
  return text;
}

std::string machine_text() {
  const Cpu processor = cpu();
  std::string text =
      fmt::format("Machine\n  {}, {} cores, {} of {} memory available\n", processor.model,
                  num_cores(), bytes_text(static_cast<double>(available_memory())),
                  bytes_text(static_cast<double>(total_memory())));
  Table table({{}, {}, {}});
  for (const CpuFeature& feature : processor.features) {
    table.add({yes_no(feature.present), feature.name, feature.serves});
  }
  return text + table.to_string(2);
}

std::string models_text() {
  using enum Table::Align;
  Table table({{"name", left},
               {"hidden", right},
               {"expert hidden", right},
               {"experts", right},
               {"topk", right}});
  for (const Model& model : models()) {
    table.add({std::string(model.name), std::to_string(model.hidden),
               std::to_string(model.expert_hidden), std::to_string(model.experts),
               std::to_string(model.topk)});
  }
  return "Models (--model)\n" + table.to_string(2);
}

std::string wires_text() {
  using enum Table::Align;
  constexpr int kHidden = 7168;
  Table table({{"name", left}, {fmt::format("bytes a row of {}", kHidden), right}});
  for (const Wire wire : all_wires()) {
    if (wire == Wire::same || wire == Wire::raw) continue;
    const WireFormat format = wire_format(wire, DType::f32, kHidden);
    table.add({std::string(name(wire)), count_text(format.row_bytes())});
  }
  return "Number formats on the way (--wire, --combine-wire; same: as the rows are)\n" +
         table.to_string(2);
}

std::string as_text() {
  std::string text =
      fmt::format("wherry {}, commit {}\n{} build by {}\n\n", build_info::kVersion,
                  build_info::git_commit(), build_info::kBuildType, build_info::kCompiler);
  text += machine_text();
  text += fmt::format("\nKernels\n  {}\n", kernels_text());
  const Devices gpus = find_devices();
  text += "\nGPUs\n";
  for (const DeviceDescription& gpu : gpus.found) {
    text += fmt::format("  {}, {} multiprocessors, {}, compute {}.{}, kernels {}\n", gpu.name,
                        gpu.multiprocessors, bytes_text(static_cast<double>(gpu.memory_bytes)),
                        gpu.compute_major, gpu.compute_minor, kernels_on(gpu));
  }
  if (gpus.found.empty()) text += fmt::format("  none: {}\n", gpus.problem);
  Table reach({{}, {}, {}});
  for (const FabricInfo& fabric : fabrics(gpus)) {
    reach.add({yes_no(fabric.available), fabric.name, fabric.reason});
  }
  text += "\nFabrics: how bytes reach other ranks\n" + reach.to_string(2);
  Table options({{}, {}, {}});
  for (const auto& option : build_info::kOptions) {
    options.add({yes_no(option.enabled), std::string(option.name),
                 fmt::format("{}: {}", option.gives, option.reason)});
  }
  text += "\nBuild options\n" + options.to_string(2);
  return text + "\n" + wires_text() + "\n" + models_text();
}

}  // namespace

void add_info(CLI::App& app, Run& run) {
  CLI::App* command =
      app.add_subcommand("info", "What this build and machine can do, and why not the rest");
  const auto json = std::make_shared<bool>(false);
  command->add_flag("--json", *json, "One JSON object on stdout");
  command->callback([&run, json] {
    run = [json] {
      if (*json) {
        print_json(as_json());
      } else {
        print_text(as_text());
      }
      return static_cast<int>(kOk);
    };
  });
}

}  // namespace wherry::cli
