# Installs the public headers, the library and the files find_package(wherry) reads.
include(CMakePackageConfigHelpers)

install(DIRECTORY "${PROJECT_SOURCE_DIR}/include/wherry"
        DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}" FILES_MATCHING PATTERN "*.hpp")
install(TARGETS wherry EXPORT wherry_targets)
set(wherry_config_dir "${CMAKE_INSTALL_LIBDIR}/cmake/wherry")
install(EXPORT wherry_targets NAMESPACE wherry:: DESTINATION "${wherry_config_dir}")
configure_package_config_file("${PROJECT_SOURCE_DIR}/cmake/wherry-config.cmake.in"
                              "${PROJECT_BINARY_DIR}/wherry-config.cmake"
                              INSTALL_DESTINATION "${wherry_config_dir}")
write_basic_package_version_file("${PROJECT_BINARY_DIR}/wherry-config-version.cmake"
                                 COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/wherry-config.cmake"
              "${PROJECT_BINARY_DIR}/wherry-config-version.cmake"
              "${PROJECT_SOURCE_DIR}/cmake/FindoneDNN.cmake"
        DESTINATION "${wherry_config_dir}")
